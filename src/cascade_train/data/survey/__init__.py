"""What a data set is like: measured, and shown on a page."""
