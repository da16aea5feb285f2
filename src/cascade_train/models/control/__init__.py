"""What stands beside a frozen network and steers it by a map: the control networks of each family."""
