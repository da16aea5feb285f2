"""cascade_train: composed research training for every part of Stable Cascade."""

__version__ = "0.1.0"
