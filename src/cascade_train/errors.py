"""The two errors a user may meet; everything else is a defect and keeps its traceback."""


class ConfigError(ValueError):
    """Something the user can fix: names the key, the value, the rule and the remedy."""


class RunError(RuntimeError):
    """Something the world did: a missing file, an unreadable sample, a number that is not finite.

    Attributes:
        shared: every rank raises the same one, so that one rank may speak for all.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared
