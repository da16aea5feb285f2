"""Which samples there are, and which of them take part."""
