"""Where a run's numbers and images are shown: nowhere, or by one of `TRACKERS`.

`metrics.jsonl` does not depend on any of this.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.engine.trackers import TRACKERS, Calls, Place
from cascade_train.errors import ConfigError, install_hint
from cascade_train.redaction import redact, redact_argument, redacted
from cascade_train.signals import STOP_SIGNALS

log = logging.getLogger(__name__)


class Tracker:
    """Shows numbers and images of one run by the calls of its tracker; without them it shows nothing.

    A failure never ends the run: the first is logged, and nothing more is sent.

    Attributes:
        run_id: continues the same tracked run after a resume, equal on all ranks; None where there is none.
        failed: nothing more is sent.
    """

    def __init__(self, run_id: str | None = None, calls: Calls | None = None) -> None:
        self.run_id = run_id
        self.failed = False
        self._calls = calls or Calls()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show the numbers of one optimizer step; None is left out."""
        shown = {name: value for name, value in values.items() if value is not None and name != "step"}
        self._try(self._calls.numbers, shown, step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Show an image file under a name that is the same at every step."""
        self._try(self._calls.image, name, path, step)

    def rewind(self, step: int) -> None:
        """Expect the steps after this one once more."""
        self._try(self._calls.rewind, step)

    def note(self, text: str) -> None:
        """Attach a sentence to the run."""
        self._try(self._calls.note, redact(text))

    def alert(self, title: str, text: str) -> None:
        """Notify the owner of the run, where the tracker can, that it has Finished, Stopped or Failed."""
        self._try(self._calls.alert, title, redact(text))

    def finish(self) -> None:
        """Send what is left and close; later calls do nothing."""
        calls, self._calls = self._calls, Calls()
        self._try(calls.finish)

    def _try(self, send: Callable[..., object], *args: Any) -> None:
        if self.failed:
            return
        try:
            send(*args)
        except Exception as error:  # trackers raise many kinds
            self.failed = True
            log.warning(
                "The tracker failed (%s). The run goes on without it; metrics.jsonl has every step.",
                redact(f"{type(error).__name__}: {error}"),
            )


def build_tracker(
    name: str,
    *,
    project: str | None,
    entity: str | None,
    mode: str,
    run_name: str,
    directory: Path,
    run_id: str | None,
    config: Mapping[str, Any],
) -> Tracker:
    """Start the tracker on rank 0, and a null one with the same `run_id` on the others. Collective.

    `name` is "none" or one of `TRACKERS`, `mode` "online" or "offline", and `config` is shown with the run, secrets
    hidden; the others are explained by `Place`. A ConfigError, on all ranks, where it cannot start.
    """
    place = Place(
        project=project,
        entity=entity,
        offline=mode == "offline",
        name=run_name,
        folder=directory / name,
        run_id=run_id,
    )
    started: list[Calls] = []

    def start() -> str | None:
        started.append(Calls(run_id=run_id) if name == "none" else _started(name, place, redacted(config)))
        return started[0].run_id

    shared_id = from_rank_zero(start)
    return Tracker(shared_id, started[0] if dist.get_rank() == 0 else None)


def _started(name: str, place: Place, config: dict[str, Any]) -> Calls:
    if name not in TRACKERS:
        raise ConfigError(f"tracker.name={name} is not one of none, {', '.join(TRACKERS)}")
    try:
        with _process_left_alone():
            return TRACKERS[name](place, config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker.name={name}: {error.name} is not installed. {install_hint(name)}, or choose tracker=none."
        ) from error
    except Exception as error:  # trackers raise many kinds; all mean that the run cannot be tracked
        raise ConfigError(
            f"tracker.name={name} could not start: {redact(str(error))}. Remedy: log in to it, or "
            "tracker.mode=offline, or tracker=none"
        ) from error


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Hide the secrets of the command line, and take back the handlers that a library sets."""
    arguments, hook = sys.argv, sys.excepthook
    handlers = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    sys.argv = [redact_argument(argument) for argument in arguments]
    try:
        yield
    finally:
        sys.argv, sys.excepthook = arguments, hook
        for each, handler in handlers.items():
            if signal.getsignal(each) is not handler:
                signal.signal(each, handler)
