"""The composition root: the only room between configuration and objects. Nothing below it sees a config node."""
