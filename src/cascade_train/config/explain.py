"""Turn what went wrong into one paragraph on rank 0, and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from cascade_train.errors import ConfigError, RunError


def exit_code(action: Callable[[], Any]) -> int:
    """Run `action` and return its exit code, None being 0; explain an error of the user or of the world."""
    try:
        return action() or 0
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        text, code = str(error), 2
    except RunError as error:
        text, code = str(error), 1
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{text}\n")
    return code
