"""Files of weights: read, converted and written."""
