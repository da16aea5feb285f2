"""What a run left: found, loaded, and sampled with."""
