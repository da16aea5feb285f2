"""Control filters: what makes the image that a ControlNet is conditioned on. One file and one YAML each."""
