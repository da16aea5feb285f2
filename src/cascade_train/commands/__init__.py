"""One file a command of `cascade-train`: its arguments, its function, and a COMMAND that declares both."""
