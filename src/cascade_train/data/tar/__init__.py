"""Tars: members, samples, index and streams."""
