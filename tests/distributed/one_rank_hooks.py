"""What goes wrong on one rank alone, while the other waits for it. Hooks of forked.py."""

from __future__ import annotations

from collections.abc import Callable

from stopping_hooks import in_step

from cascade_train.errors import RunError


def raising(error: Exception) -> Callable[[], None]:
    """Return what raises an error."""

    def act() -> None:
        raise error

    return act


fail_on_rank_zero = in_step(3, raising(RunError("no more numbers")), rank=0)
fail_on_rank_one = in_step(3, raising(RunError("no more numbers")), rank=1)
defect_on_rank_one = in_step(3, raising(KeyError("defect")), rank=1)
