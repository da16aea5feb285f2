"""Files of weights that only Stable Cascade has."""
