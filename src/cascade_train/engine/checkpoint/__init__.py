"""Checkpoints: written whole, verified, loaded, and removed in time."""
