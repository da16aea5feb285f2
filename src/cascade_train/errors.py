"""The errors that a user may see, and an end by a signal; everything else is a defect with a traceback."""

import re
import shutil
import sysconfig
import traceback
from pathlib import Path

STOPPED = 75
"""Exit code of a run that was stopped and continues with the same command: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 and the number of the signal."""


class ConfigError(ValueError):
    """Something the user can fix: names the key, the value, the rule and the remedy."""


def install_hint(extra: str) -> str:
    """Return how to install an extra; from the library's own folder, since it is in no package index."""
    return f"Install it, in the folder of cascade_train: pip install --editable '.[{extra}]'"


LESS_MEMORY = (
    "train.micro_batch_size=auto (gradient accumulation), activation_checkpointing=true, data=cached (no encoders on "
    "the device), optimizer=adamw_8bit, parallel=fsdp on several GPUs, task=lora, or memory=auto, which chooses; "
    "docs/memory.md lists what each costs"
)
"""What needs less memory, for messages."""


class RunError(RuntimeError):
    """A failure at run time; where every rank raises the same one, it is `shared`, and only rank 0 prints it."""

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


def line_of_user(error: BaseException) -> str:
    """Return the innermost line of a user's own file below ours, as "mine.py, line 3, in loss: "; or empty."""
    installed = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
    called, found = False, ""
    for each in traceback.extract_tb(error.__traceback__):
        if Path(each.filename).is_relative_to(Path(__file__).parent):
            called = True
        elif called and not each.filename.startswith(installed):
            found = f"{Path(each.filename).name}, line {each.lineno}, in {each.name}: "
    return found


LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Timed out waiting \d+ms|Application timeout caused pair closure|Broken pipe"
)
"""Messages of gloo on the other ranks when one has ended or hangs."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange failed because another rank has ended or hangs."""
    return isinstance(error, RuntimeError) and not isinstance(error, RunError) and bool(LOST_PEER.search(str(error)))


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process at once, with the exit code `code`."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def unwritten(path: Path, error: Exception) -> str:
    """Return a message that `path` could not be written, why, and how much space is left on its disk."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(there).free / 2**30
    return f"{path} could not be written: {error} ({free:.3f} GiB are free there)"
