"""Kinds of adapters: one file each, and `kind.py`, the contract."""
