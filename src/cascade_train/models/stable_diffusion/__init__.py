"""Stable Diffusion 1.x, 2.x and XL and their autoencoders, and all that only they know."""
