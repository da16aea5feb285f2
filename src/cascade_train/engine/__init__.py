"""The one loop and what it owns: state, updates, averages, checkpoints, metrics, tracking, samples."""
