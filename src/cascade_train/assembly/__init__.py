"""The composition root: builds the parts that a configuration names, and joins them to a run."""
