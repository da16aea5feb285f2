"""Signatures and values read from source files, without importing them."""
