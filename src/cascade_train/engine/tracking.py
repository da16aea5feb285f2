"""Where a run's numbers and images are shown: nowhere, or by one of `TRACKERS`.

`metrics.jsonl` does not depend on any of this.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.engine.checkpoint.writing import Background
from cascade_train.engine.trackers import TRACKERS, Calls, Destination
from cascade_train.errors import ConfigError, install_hint
from cascade_train.redaction import redact, redact_argument, redacted
from cascade_train.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

MOST_WAITING, SECONDS = 1000, 60.0
"""Pending calls above which the run waits for the tracker; how long for one of them, and at the end for all."""


class Tracker:
    """Shows numbers and images of one run by the calls of its tracker; without them it shows nothing.

    A thread makes the calls in order, so that a slow tracker does not hold up the run. A tracker that fails or hangs
    never ends the run: the first failure is logged, and nothing more is sent. `run_id` continues the same tracked run
    after a resume, and is equal on all ranks.
    """

    def __init__(self, run_id: str | None = None, calls: Calls | None = None) -> None:
        self.run_id = run_id
        self.failed = False
        self._calls = calls or Calls()
        self._sender = Background(name="tracker")
        self._sent: deque[Future[None]] = deque()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show the numbers of one optimizer step; None is left out."""
        shown = {name: value for name, value in values.items() if value is not None and name != "step"}
        self._send(self._calls.numbers, shown, step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Show an image file under a name that is the same at every step."""
        self._send(self._calls.image, name, path, step)

    def rewind(self, step: int) -> None:
        """Expect the steps after this one once more."""
        self._send(self._calls.rewind, step)

    def note(self, text: str) -> None:
        """Attach a sentence to the run."""
        self._send(self._calls.note, redact(text))

    def alert(self, title: str, text: str) -> None:
        """Notify the owner of the run, where the tracker can, that it has Finished, Stopped or Failed."""
        self._send(self._calls.alert, title, redact(text))

    def finish(self) -> None:
        """Send what is left and close, within `SECONDS`; later calls do nothing."""
        calls, self._calls = self._calls, Calls()
        self._send(calls.finish)
        self._wait(0, until=time.monotonic() + SECONDS)
        if not self._sent:
            self._sender.end()

    def _send(self, send: Callable[..., object] | None, *args: Any) -> None:
        if send is not None and not self.failed:
            self._sent.append(self._sender.begin(partial(self._try, send, *args)))
            self._wait(MOST_WAITING)

    def _wait(self, most: int, *, until: float = math.inf) -> None:
        """Wait until at most this many calls are pending, or a time; give up on a tracker that takes longer."""
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            seconds = 0.0 if self.failed else max(min(SECONDS, until - time.monotonic()), 0.0)
            try:
                self._sent[0].result(seconds)
            except TimeoutError:
                self._fail(f"what it was sent has not ended within {SECONDS:.0f} s")
                return
            self._sent.popleft()

    def _try(self, send: Callable[..., object], *args: Any) -> None:
        try:
            if not self.failed:
                send(*args)
        except Exception as error:  # trackers raise many kinds
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            message = "The tracker failed (%s). The run goes on without it; metrics.jsonl has every step."
            log.warning(message, redact(reason))


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
    beside: bool = False,
) -> Tracker:
    """Start the tracker on rank 0, and one that shows nothing, with the same `run_id`, on the others. Collective.

    `name` is "none" or one of `TRACKERS`, `mode` "online" or "offline", and `config` is shown with the run, secrets
    hidden; for the others see `Destination`. A ConfigError, on all ranks, where it cannot start.
    """
    target = Destination(
        project=project,
        entity=entity,
        offline=mode == "offline",
        name=run_name,
        folder=directory / name,
        run_id=run_id,
        beside=beside,
    )
    started: list[Calls] = []

    def start() -> str | None:
        started.append(Calls(run_id=run_id) if name == "none" else _start(name, target, redacted(config)))
        return started[0].run_id

    shared_id = from_rank_zero(start)
    return Tracker(shared_id, started[0] if dist.get_rank() == 0 else None)


def _start(name: str, target: Destination, config: dict[str, Any]) -> Calls:
    if name not in TRACKERS:
        raise ConfigError(f"tracker.name={name} is not one of none, {', '.join(TRACKERS)}")
    try:
        with _restore_process():
            return TRACKERS[name](target, config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker.name={name}: {error.name} is not installed. {install_hint(name)}, or choose tracker=none."
        ) from error
    except Exception as error:  # trackers raise many kinds; all mean that the run cannot be tracked
        if target.run_id is not None:  # of another tracker or place, or removed there
            message = "tracker.name=%s could not continue its run %s (%s) and begins another."
            log.warning(message, name, target.run_id, redact(str(error)))
            return _start(name, replace(target, run_id=None), config)
        reason = redact(str(error) or type(error).__name__)
        raise ConfigError(
            f"tracker.name={name} could not start: {reason}. Remedy: log in to it, or "
            "tracker.mode=offline, or tracker=none"
        ) from error


@contextmanager
def _restore_process() -> Iterator[None]:
    """Hide the secrets of the command line for the block, and restore the handlers that a library replaced."""
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
