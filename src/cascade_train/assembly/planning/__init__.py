"""Plan a run: memory, time and disk."""
