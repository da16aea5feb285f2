"""The two errors a user may meet, and the end that someone asked for; everything else is a defect with a traceback."""

import re
import shutil
from pathlib import Path

STOPPED = 75
"""Exit code of a run that was stopped and goes on with the same command: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""Exit code after Ctrl-C that ends at once, as shells have it: 128 and the number of the signal."""


class ConfigError(ValueError):
    """Something the user can fix: names the key, the value, the rule and the remedy."""


def install_hint(extra: str) -> str:
    """Return how an extra is installed; the library is in no package index, so that its own folder is named."""
    return f"Install it, in the folder of cascade_train: pip install --editable '.[{extra}]'"


class RunError(RuntimeError):
    """Something the world did: a missing file, an unreadable sample, a number that is not finite.

    Attributes:
        shared: every rank raises the same one, so that one rank may speak for all.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class RankLostError(RunError):
    """Another rank has ended or hangs.

    Attributes:
        code: exit code of the process, that of the rank that ended where it is known.
    """

    def __init__(self, message: str, *, shared: bool = False, code: int = 1) -> None:
        super().__init__(message, shared=shared)
        self.code = code


LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Timed out waiting \d+ms|Application timeout caused pair closure|Broken pipe"
)
"""What gloo says on the ranks that are left when one has ended or hangs."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process at once.

    Attributes:
        code: exit code of the process.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def unwritten(path: Path, error: Exception) -> str:
    """Return in words that something could not be written, why, and how much room is left on its disk."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(there).free / 2**30
    return f"{path} could not be written: {error} ({free:.3f} GiB are free there)"
