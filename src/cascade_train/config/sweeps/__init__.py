"""Sweeps: their names, their jobs on SLURM, their ranking."""
