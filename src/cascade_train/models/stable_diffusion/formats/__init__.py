"""Files of weights that only Stable Diffusion has."""
