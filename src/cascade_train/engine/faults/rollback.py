"""Rollback after a bad step (bad_step.py): back to the newest good checkpoint, without the samples at fault."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.parallelize import local
from cascade_train.engine.checkpoint.folder import find_fault
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.faults.bad_step import BadStepError
from cascade_train.engine.loop import Trainer
from cascade_train.engine.phase import BoundPhase
from cascade_train.errors import RunError
from cascade_train.files.durable import append_durably, read_whole_lines

log = logging.getLogger(__name__)

_ADVICE = (
    "If other samples fail at the same steps, the data is not at fault: lower optimizer.lr or train.max_grad_norm, or "
    "raise lr_scheduler.warmup_steps. To go on as before, raise rollback.max_times"
)


class RolledBackList:
    """The rollbacks of a run, one line each: `{"step": 7, "back_to": 5, "reason": "...", "keys": [...]}`.

    There were `times` rollbacks, and the samples of `keys` are left out since. A torn line is dropped: its rollback did
    not happen. The constructor is collective.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = from_rank_zero(self._read)
        self.times = len(lines)
        self.keys = {key for line in lines for key in line}

    def add(self, bad: BadStepError, back_to: int) -> None:
        """Append a rollback. Collective."""
        line = json.dumps({"step": bad.step, "back_to": back_to, "reason": str(bad), "keys": list(bad.keys)})
        from_rank_zero(lambda: append_durably(self._path, line + "\n"))
        self.times += 1
        self.keys.update(bad.keys)

    def _read(self) -> list[list[str]]:
        try:
            lines = read_whole_lines(self._path, errors="strict")
            return [[str(key) for key in json.loads(line)["keys"]] for line in lines]
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{self._path} is damaged ({error}): it lists the samples that the run leaves out. Remedy: mend the "
                "line, or remove the file to train on all samples again"
            ) from error


@dataclass(kw_only=True)
class Rollback:
    """Runs a trainer to its end, from a checkpoint again after each bad step.

    At most `max_times` in a run; None = a bad step ends it. `origin` is the checkpoint, if any, that the run started
    from, for the time before its own first. `cut_metrics` drops the metrics after a step and is collective.
    """

    listed: RolledBackList
    max_times: int | None
    origin: Path | None
    cut_metrics: Callable[[int], None]

    def run(self, trainer: Trainer) -> None:
        """Train to the end; a RunError when rollbacks are used up, or there is no good checkpoint. Collective."""
        while True:
            try:
                return trainer.run()
            except BadStepError as bad:
                if self.max_times is None:
                    raise
                if self.listed.times >= self.max_times:
                    text = f"{bad} Rolled back {self.listed.times} times already. {_ADVICE}."
                    raise RunError(text, shared=True) from bad
                self._go_back(trainer, bad)

    def _go_back(self, trainer: Trainer, bad: BadStepError) -> None:
        """Restore the newest good checkpoint and exclude the samples at fault; a kill in between changes nothing."""
        self._restore_good(trainer, bad)
        self.listed.add(bad, trainer.step)
        trainer.feed.exclude(bad.keys)
        self.cut_metrics(trainer.step)
        more = f" and {len(bad.keys) - 8} more" if len(bad.keys) > 8 else ""
        message = f"Rolled back to step {trainer.step}, without {', '.join(bad.keys[:8])}{more}, since: {bad}"
        if trainer.world.is_main:
            log.warning("%s", message)
        trainer.tracker.note(message)

    def _restore_good(self, trainer: Trainer, bad: BadStepError) -> None:
        """Restore the newest checkpoint that verifies and whose weights are finite. Collective.

        A step is checked before it is saved, so that a checkpoint has no bad step. Weights that overflow in an update
        are found in the next step only, when they may have been saved: such a checkpoint is removed.
        """
        trainer.store.wait()
        while (path := from_rank_zero(lambda: self._newest(trainer.store))) is not None:
            trainer.restore(path)
            if weights_are_finite(trainer.phases):
                return
            if trainer.world.is_main:
                log.warning("The weights in %s are not finite; an older checkpoint is taken.", path)
            if path == self.origin:
                self.origin = None
            else:
                from_rank_zero(partial(shutil.rmtree, path))
        raise RunError(
            f"{bad} There is no checkpoint to go back to. Remedy: a smaller checkpoint.every_steps", shared=True
        ) from bad

    def _newest(self, store: CheckpointStore) -> Path | None:
        newest = store.newest()
        if newest is None and self.origin is not None and find_fault(self.origin) is None:
            return self.origin
        return newest


def weights_are_finite(phases: Sequence[BoundPhase]) -> bool:
    """Return whether all trained weights are finite numbers. Collective."""
    weights = [local(p.detach()) for phase in phases for p in phase.parameters.values()]
    return all(from_every_rank(lambda: all(bool(weight.isfinite().all()) for weight in weights)))
