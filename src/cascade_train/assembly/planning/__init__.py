"""Before a run: what it will hold, for how long it will train, and what it will leave on the disk."""
