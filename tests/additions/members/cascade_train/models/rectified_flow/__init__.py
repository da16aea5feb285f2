"""A rectified-flow transformer as a family of its own: Stable Diffusion 3's architecture, from diffusers."""
