"""Tasks: what trains and how a batch becomes a loss, one small file each."""
