"""The stages of Stable Cascade, and all that only they know."""
