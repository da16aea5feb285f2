"""Networks of Stable Diffusion, from diffusers."""
