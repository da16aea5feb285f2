"""What a run left: found, loaded, and painted with."""
