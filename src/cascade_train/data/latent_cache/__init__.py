"""The files of a cache of encoder outputs."""
