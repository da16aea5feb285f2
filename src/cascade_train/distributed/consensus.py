"""One rank's result or failure, sent to every rank, so that none waits for a rank that already failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, cast

import torch.distributed as dist

from cascade_train.errors import ConfigError, RunError

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What ranks exchange: a value, or the text of an error (exceptions may not pickle)."""

    rank: int
    value: T | None = None
    error: str | None = None
    user_can_fix: bool = False


def own_group(timeout: timedelta) -> dist.ProcessGroup:
    """Open a gloo group of all ranks, for exchanges that must not meet any other. Collective."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # else this rank were none of its members
    return group


def from_rank_zero(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on rank 0 alone and return its value, which must pickle, on every rank. Collective.

    Raises:
        ConfigError: `work` raised one.
        RunError: `work` raised one, or an OSError; for any other exception, on the ranks that did not raise it.
    """
    outcome, cause = _attempt(work) if dist.get_rank() == 0 else (None, None)
    box = [outcome]
    dist.broadcast_object_list(box, src=0, group=group)
    return _value(cast("_Outcome[T]", box[0]), cause)


def from_every_rank(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank and return all values, which must pickle, in rank order. Collective.

    Raises:
        ConfigError: `work` raised one on some rank; that of the lowest such rank is raised on all.
        RunError: the same, or an OSError; for any other exception, on the ranks that did not raise it.
    """
    outcome, cause = _attempt(work)
    outcomes: list[_Outcome[T] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    return [_value(outcome, cause) for outcome in cast("list[_Outcome[T]]", outcomes)]


def _attempt(work: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
    rank = dist.get_rank()
    try:
        return _Outcome(rank, value=work()), None
    except (ConfigError, RunError) as error:
        return _Outcome(rank, error=str(error), user_can_fix=isinstance(error, ConfigError)), error
    except Exception as error:  # every failure must reach the ranks that wait for this one
        return _Outcome(rank, error=f"rank {rank}: {type(error).__name__}: {error}"), error


def _value(outcome: _Outcome[T], cause: Exception | None) -> T:
    """Value of an outcome; raises its error, with `cause`, this rank's own, behind it."""
    if outcome.error is None:
        return cast(T, outcome.value)
    if cause is not None and not isinstance(cause, ConfigError | RunError | OSError):
        raise cause  # a defect
    if outcome.user_can_fix:
        raise ConfigError(outcome.error) from cause
    raise RunError(outcome.error, shared=True) from cause
