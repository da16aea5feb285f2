"""Processes and meshes: the group, the seam that shards modules, agreement between ranks, and step randomness."""
