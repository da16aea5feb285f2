"""Evaluate the checkpoints of a run, also as they appear while it trains."""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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

ROUND_SECONDS = 600.0
"""How long other ranks wait for rank 0 at once."""

Found = TypeVar("Found")


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
        """Export a checkpoint, evaluate it, and publish the numbers. Collective.

        Raises:
            ConfigError: no such checkpoint.
            RunError: it is damaged.
        """
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


def _poll(look: Callable[[], Found | None], *, seconds: float, sleep: Callable[[float], None]) -> Found | None:
    waited = 0.0
    while (found := look()) is None and waited < seconds:
        pause = min(POLL_SECONDS, seconds - waited)
        sleep(pause)
        waited += pause
    return found


def wait_for_run(run: Path, *, max_wait_hours: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until a run begins in a folder that is not there yet."""
    if not run.exists():
        log.warning("watch=%s: no such folder yet; waits until a run begins in %s.", run, run.absolute())
    longest = math.inf if max_wait_hours is None else 3600 * max_wait_hours
    if _poll(lambda: run.exists() or None, seconds=longest, sleep=sleep) is None:
        raise ConfigError(f"watch={run}: no run has begun there in max_wait_hours={max_wait_hours}. Name its folder.")


def watch(watched: Watched, judge: Judge, world: World, *, max_wait_hours: float | None) -> int:
    """Evaluate each new checkpoint of a run until the run has finished; return how many. Collective.

    One that was evaluated in the same way already is skipped. One that retention deletes before it is read is left
    out, with a warning. `max_wait_hours` without a new one end the watch; None = no limit.
    """
    checkpoints, tried, count = watched.run / "checkpoints", set[tuple[int, str | None]](), 0
    longest = math.inf if max_wait_hours is None else 3600 * max_wait_hours
    begun = time.monotonic()
    settings = judge.digest(watched.model, watched.decoder)
    done = from_rank_zero(lambda: judged(watched.run, settings))
    if world.is_main:
        sys.stdout.write(f"Watches {watched.run}: each checkpoint is judged as it appears\n")
        sys.stdout.flush()

    def look() -> tuple[Manifest | None, bool]:
        left = max(0.0, begun + longest - time.monotonic())
        found, has_ended = next_checkpoint(checkpoints, done | tried, seconds=min(left, ROUND_SECONDS))
        return found, has_ended or left <= ROUND_SECONDS

    while True:
        found, has_ended = from_rank_zero(look)  # by one clock
        if found is not None:
            tried.add((found.step, found.stamp))
            try:
                watched.judge(judge, found.step, world)
                count += 1
            except Exception as error:  # of many kinds, where files vanish that are being read
                if checkpoint_stamp(checkpoints / f"step_{found.step}") == found.stamp:
                    raise
                rule = "The checkpoint of step %d was deleted or replaced while it was judged: %s"
                log.warning(rule, found.step, error)
            begun = time.monotonic()
        elif has_ended:
            return count


def checkpoint_stamp(checkpoint: Path) -> str | None:
    """Return what changes with the weights of a checkpoint; None where it is not there, or not whole."""
    manifest = whole_manifest(checkpoint)
    return None if manifest is None else manifest.stamp


def next_checkpoint(
    checkpoints: Path,
    done: set[tuple[int, str | None]],
    *,
    seconds: float = ROUND_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Manifest | None, bool]:
    """Return the first complete checkpoint that is not done, waiting `seconds` for one, and whether no other will come.

    `done` are steps with the stamps of their weights, None = any: a step that is saved again is not done. A run whose
    newest checkpoint is its final one saves no other, unless it is being continued.
    """

    def look() -> tuple[Manifest | None, bool] | None:
        complete = CheckpointFolder(checkpoints).complete()
        left = [each for step, each in complete.items() if done.isdisjoint({(step, each.stamp), (step, None)})]
        if left:
            return left[0], False
        newest = list(complete.values())[-1:]
        has_ended = newest and newest[0].facts.get("finished") and not (checkpoints.parent / LOCK_NAME).exists()
        return (None, True) if has_ended else None

    return _poll(look, seconds=seconds, sleep=sleep) or (None, False)
