"""Networks, stages, frozen encoders, adapters, and their weights in every format. The only home of diffusers."""
