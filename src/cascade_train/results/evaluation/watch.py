"""Evaluate an export, a checkpoint of a run, or each checkpoint as it appears while the run trains."""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cascade_train.config.saved import CONFIG_NAME
from cascade_train.config.schema import ParallelMode
from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.distributed.process_group import World, process_group
from cascade_train.engine.checkpoint.folder import CheckpointFolder, Manifest, read_manifest, whole_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.run.lock import LOCK_NAME
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import exported_step, is_run
from cascade_train.results.evaluation.evaluate import Evaluator, Settings, measurable
from cascade_train.results.evaluation.result import Evaluation, publish
from cascade_train.results.export import export_checkpoint, find_checkpoint
from cascade_train.results.find import TrainedModel, run_of

log = logging.getLogger(__name__)

POLL_SECONDS = 10.0
"""Between looks at the folder of checkpoints."""

Done = set[tuple[int, str]]
"""Steps of checkpoints and stamps of their weights."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What is evaluated: a stage, the one after it, and the run that left the first.

    `out` gets the pictures, of a run's checkpoint its `step_<n>`. `track`: log the numbers to the run's tracker too.
    """

    model: TrainedModel
    decoder: TrainedModel | None
    run: Path | None
    out: Path | None
    track: bool

    def evaluate_weights(self, settings: dict[str, Any]) -> Evaluation:
        """Evaluate what a run exported, or other weights, as `Settings` of these arguments say. Collective."""
        run, out, stamp = self.run, self.out or Path("evaluation"), None
        step = None if run is None else exported_step(run)
        if run is not None:
            name = "export" if step is None else f"step_{step}"
            out = self.out or run / "evaluation" / name
            stamp = _stamp_of(run / "checkpoints" / name)  # of the same weights
        with process_group() as world:
            evaluator = Evaluator(measurable(Settings(**settings), self.model), world)
            result = evaluator.evaluate(self.model, self.decoder, out, run=run, stamp=stamp)
            assert result is not None, "evaluated again"
            publish(result, out, run=run, step=step, track=self.track, is_main=world.is_main)
        return result

    def evaluate_checkpoint(self, evaluator: Evaluator, step: int, world: World, *, again: bool) -> Evaluation | None:
        """Export a checkpoint, evaluate it, and publish the numbers; None if they are there. Collective."""
        assert self.run is not None, "checkpoints are those of a run"
        folder, checkpoints = (self.out or self.run / "evaluation") / f"step_{step}", self.run / "checkpoints"
        weights = folder / "weights"
        stamp = from_rank_zero(lambda: read_manifest(find_checkpoint(CheckpointStore(checkpoints), step)).stamp)

        def prepare() -> None:
            from_rank_zero(lambda: shutil.rmtree(weights, ignore_errors=True))  # of a killed evaluation
            cfg = self.model.cfg.copy()
            cfg.parallel.mode = ParallelMode.single if world.ranks == 1 else ParallelMode.auto
            export_checkpoint(cfg, checkpoints, world, step=step, out=weights)

        model = replace(self.model, origin=f"{self.model.origin}, step {step}", export=weights)
        given: dict[str, Any] = {"run": self.run, "stamp": stamp, "prepare": prepare, "again": again}
        try:
            result = evaluator.evaluate(model, self.decoder, folder, **given)
        finally:
            if world.is_main:
                shutil.rmtree(weights, ignore_errors=True)
        if result is not None:
            publish(result, folder, run=self.run, step=step, track=self.track, is_main=world.is_main)
        return result

    def evaluate_checkpoints(
        self, settings: dict[str, Any], checkpoint: int | None, max_wait_hours: float | None
    ) -> Evaluation | None:
        """Evaluate one checkpoint of a run, None = each as it appears. Collective."""
        with process_group() as world:
            evaluator = Evaluator(measurable(Settings(**settings), self.model), world)
            if checkpoint is not None:
                return self.evaluate_checkpoint(evaluator, checkpoint, world, again=True)
            count = watch(self, evaluator, world, max_wait_hours=max_wait_hours)
        if world.is_main:
            sys.stdout.write(f"{count} checkpoints of {self.run} evaluated\n")
        return None


def find_run(path: Path) -> Path | None:
    """Find the run that left what is at `path`; None of published weights, or of an export that was moved."""
    run = run_of(path)
    if run is not None and run.name == "export" and (run.parent / CONFIG_NAME).is_file():
        run = run.parent
    return run if run is not None and is_run(run) else None


def wait_for_run(run: Path, *, max_wait_hours: float | None) -> None:
    """Wait until a run begins in a folder that is not there yet."""
    deadline = _deadline(max_wait_hours)
    if not run.exists():
        log.warning("watch=%s: no such folder yet; waits until a run begins in %s.", run, run.absolute())
    while not run.exists():
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"watch={run}: no run has begun there in max_wait_hours={max_wait_hours}. Name its folder."
            )
        time.sleep(POLL_SECONDS)


def _deadline(max_wait_hours: float | None) -> float:
    return math.inf if max_wait_hours is None else time.monotonic() + 3600 * max_wait_hours


def watch(stages: Stages, evaluator: Evaluator, world: World, *, max_wait_hours: float | None) -> int:
    """Evaluate each new checkpoint of a run until the run has finished; return how many. Collective.

    One that was evaluated in the same way already is skipped. One that retention deletes before it is read is left
    out, with a warning. `max_wait_hours` without a new one end the watch; None = no limit.
    """
    assert stages.run is not None, "a watch is that of a run"
    checkpoints, count, done = stages.run / "checkpoints", 0, Done()
    if world.is_main:
        sys.stdout.write(f"Watches {stages.run}: each checkpoint is evaluated as it appears\n")
        sys.stdout.flush()
    deadline = _deadline(max_wait_hours)

    def look() -> tuple[Manifest | None, bool]:
        manifest, has_ended = next_checkpoint(checkpoints, done)
        return manifest, has_ended or time.monotonic() >= deadline

    while True:
        manifest, has_ended = from_rank_zero(look)  # by one clock
        if manifest is not None:
            done.add((manifest.step, manifest.stamp))
            try:
                count += stages.evaluate_checkpoint(evaluator, manifest.step, world, again=False) is not None
            except Exception as error:  # of many kinds, where files vanish that are being read
                if _stamp_of(checkpoints / f"step_{manifest.step}") == manifest.stamp:
                    raise
                rule = "The checkpoint of step %d was deleted or replaced while it was evaluated: %s"
                log.warning(rule, manifest.step, error)
            deadline = _deadline(max_wait_hours)
        elif has_ended:
            return count
        else:
            time.sleep(POLL_SECONDS)


def _stamp_of(checkpoint: Path) -> str | None:
    """What changes with the weights of a checkpoint; None if it is not there, or not whole."""
    manifest = whole_manifest(checkpoint)
    return None if manifest is None else manifest.stamp


def next_checkpoint(checkpoints: Path, done: Done) -> tuple[Manifest | None, bool]:
    """Find the first complete checkpoint that is not done, and whether no other will come.

    A step that is saved again is not done. A run whose newest checkpoint is its final one saves no other, unless it is
    being continued.
    """
    complete = CheckpointFolder(checkpoints).complete()
    for step, manifest in complete.items():
        if (step, manifest.stamp) not in done:
            return manifest, False
    newest = list(complete.values())[-1:]
    is_finished = bool(newest and newest[0].facts.get("finished"))
    return None, is_finished and not (checkpoints.parent / LOCK_NAME).exists()
