"""What a set of samples is like: looked at, compared, and laid out as `cascade-train inspect` reports it."""
