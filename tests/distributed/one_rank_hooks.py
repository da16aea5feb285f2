"""What goes wrong on one rank alone, while the other waits for it. Hooks of forked.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stopping_hooks import in_step

from cascade_train.assembly import run
from cascade_train.errors import ConfigError, RunError


def raising(error: Exception) -> Callable[[], None]:
    """Return what raises an error."""

    def act() -> None:
        raise error

    return act


def in_set_up(act: Callable[[], Any], *, rank: int) -> Callable[[Path], None]:
    """Return a hook that acts on one rank before it builds what it trains."""

    def hook(out: Path) -> None:
        build_phases = run.build_phases

        def build(*args: Any) -> Any:
            if os.environ["RANK"] == str(rank):
                act()
            return build_phases(*args)

        run.build_phases = build

    return hook


REFUSED = ConfigError("model.weights=x is not there")
refuse_on_rank_zero = in_set_up(raising(REFUSED), rank=0)
refuse_on_rank_one = in_set_up(raising(REFUSED), rank=1)
stop_on_rank_one = in_set_up(lambda: signal.raise_signal(signal.SIGTERM), rank=1)
fail_on_rank_zero = in_step(3, raising(RunError("no more numbers")), rank=0)
fail_on_rank_one = in_step(3, raising(RunError("no more numbers")), rank=1)
defect_on_rank_one = in_step(3, raising(KeyError("defect")), rank=1)
