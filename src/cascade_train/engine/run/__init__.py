"""The run directory: claimed, locked, compared with its configuration."""
