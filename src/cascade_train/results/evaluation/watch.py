"""Evaluate the checkpoints of a run, also as they appear while it trains."""

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
from cascade_train.results.evaluation.judge import Judge, Settings, locked, measurable
from cascade_train.results.evaluation.verdict import Verdict, judged, publish
from cascade_train.results.export import export_checkpoint, find_checkpoint
from cascade_train.results.find import TrainedModel, run_of

log = logging.getLogger(__name__)

POLL_SECONDS = 10.0
"""Between looks at the folder of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run whose checkpoints are evaluated: its folder, its configuration, and the stage after it.

    `out` gets a `step_<n>` for each checkpoint. `track`: log the numbers to the run's tracker too.
    """

    run: Path
    model: TrainedModel
    decoder: TrainedModel | None
    out: Path
    track: bool

    def judge(self, judge: Judge, step: int, world: World) -> Verdict:
        """Export a checkpoint, evaluate it, and publish the numbers. Collective."""
        folder, checkpoints = self.out / f"step_{step}", self.run / "checkpoints"
        weights = folder / "weights"
        stamp = from_rank_zero(lambda: read_manifest(find_checkpoint(CheckpointStore(checkpoints), step)).stamp)

        def prepare() -> None:
            from_rank_zero(lambda: shutil.rmtree(weights, ignore_errors=True))  # of a killed evaluation
            cfg = self.model.cfg.copy()
            cfg.parallel.mode = ParallelMode.single if world.ranks == 1 else ParallelMode.auto
            export_checkpoint(cfg, checkpoints, world, step=step, out=weights)

        model = replace(self.model, origin=f"{self.model.origin}, step {step}", export=weights)
        with locked(folder, world):
            try:
                found = judge.judge(model, self.decoder, folder, run=self.run, stamp=stamp, prepare=prepare)
            finally:
                if world.is_main:
                    shutil.rmtree(weights, ignore_errors=True)
            publish(found, folder, run=self.run, step=step, track=self.track, is_main=world.is_main)
        return found


def find_run(path: Path) -> Path | None:
    """Return the run that left what is at `path`; None of published weights, or of an export that was moved."""
    run = run_of(path)
    if run is not None and run.name == "export" and (run.parent / CONFIG_NAME).is_file():
        run = run.parent
    return run if run is not None and is_run(run) else None


def judge_weights(
    settings: dict[str, Any],
    model: TrainedModel,
    decoder: TrainedModel | None,
    run: Path | None,
    *,
    out: Path | None,
    track: bool,
) -> Verdict:
    """Judge what a run exported, or other weights, as `Settings` of these arguments say. Collective."""
    step = None if run is None else exported_step(run)
    name = "export" if step is None else f"step_{step}"
    folder, stamp = Path("evaluation"), None
    if run is not None:
        folder, stamp = run / "evaluation" / name, checkpoint_stamp(run / "checkpoints" / name)  # of the same weights
    folder = out or folder
    with process_group() as world, locked(folder, world):
        judge = Judge(measurable(Settings(**settings), model), world)
        found = judge.judge(model, decoder, folder, run=run, stamp=stamp)
        publish(found, folder, run=run, step=step, track=track, is_main=world.is_main)
    return found


def judge_checkpoints(
    settings: dict[str, Any],
    model: TrainedModel,
    decoder: TrainedModel | None,
    run: Path,
    checkpoint: int | None,
    max_wait_hours: float | None,
    *,
    out: Path | None,
    track: bool,
) -> Verdict | None:
    """Judge one checkpoint of a run, None = each as it appears, as `judge_weights` otherwise. Collective."""
    with process_group() as world:
        judge = Judge(measurable(Settings(**settings), model), world)
        watched = Watched(run=run, model=model, decoder=decoder, out=out or run / "evaluation", track=track)
        if checkpoint is not None:
            return watched.judge(judge, checkpoint, world)
        count = watch(watched, judge, world, max_wait_hours=max_wait_hours)
    if world.is_main:
        sys.stdout.write(f"{count} checkpoints of {run} judged\n")
    return None


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


def watch(watched: Watched, judge: Judge, world: World, *, max_wait_hours: float | None) -> int:
    """Evaluate each new checkpoint of a run until the run has finished; return how many. Collective.

    One that was evaluated in the same way already is skipped. One that retention deletes before it is read is left
    out, with a warning. `max_wait_hours` without a new one end the watch; None = no limit.
    """
    checkpoints, count = watched.run / "checkpoints", 0
    settings = judge.digest(watched.model, watched.decoder)
    done = from_rank_zero(lambda: judged(watched.run, settings))
    if world.is_main:
        sys.stdout.write(f"Watches {watched.run}: each checkpoint is judged as it appears\n")
        sys.stdout.flush()
    deadline = _deadline(max_wait_hours)

    def look() -> tuple[Manifest | None, bool]:
        found, has_ended = next_checkpoint(checkpoints, done)
        return found, has_ended or time.monotonic() >= deadline

    while True:
        found, has_ended = from_rank_zero(look)  # by one clock
        if found is not None:
            done.add((found.step, found.stamp))
            try:
                watched.judge(judge, found.step, world)
                count += 1
            except Exception as error:  # of many kinds, where files vanish that are being read
                if checkpoint_stamp(checkpoints / f"step_{found.step}") == found.stamp:
                    raise
                rule = "The checkpoint of step %d was deleted or replaced while it was judged: %s"
                log.warning(rule, found.step, error)
            deadline = _deadline(max_wait_hours)
        elif has_ended:
            return count
        else:
            time.sleep(POLL_SECONDS)


def checkpoint_stamp(checkpoint: Path) -> str | None:
    """Return what changes with the weights of a checkpoint; None where it is not there, or not whole."""
    manifest = whole_manifest(checkpoint)
    return None if manifest is None else manifest.stamp


def next_checkpoint(checkpoints: Path, done: set[tuple[int, str | None]]) -> tuple[Manifest | None, bool]:
    """Return the first complete checkpoint that is not done, and whether no other will come.

    `done` are steps with the stamps of their weights, None = any: a step that is saved again is not done. A run whose
    newest checkpoint is its final one saves no other, unless it is being continued.
    """
    complete = CheckpointFolder(checkpoints).complete()
    for step, manifest in complete.items():
        if done.isdisjoint({(step, manifest.stamp), (step, None)}):
            return manifest, False
    newest = list(complete.values())[-1:]
    is_finished = bool(newest and newest[0].facts.get("finished"))
    return None, is_finished and not (checkpoints.parent / LOCK_NAME).exists()
