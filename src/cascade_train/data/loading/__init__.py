"""From planned rows to batches: worker processes, and what they return."""
