"""What filters are made of: image operations, networks and the libraries they need."""
