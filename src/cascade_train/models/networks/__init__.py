"""Networks as torch modules: what stages, encoders and tasks build."""
