"""The one loop. It knows neither stage nor objective nor data.

A step is an optimizer step. Everything about a step or a sample is a function of its number and identity, so that a
resumed run repeats an uninterrupted one.

Shape legend: B samples of a micro-batch, G samples of the global batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.distributed.parallelize import groups_of, set_gradient_sync
from cascade_train.distributed.process_group import World, step_timeout
from cascade_train.distributed.rng import seed_micro_batch
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.faults.bad_samples import Trace, UnreadableList, not_finite
from cascade_train.engine.faults.stopping import Request, Stopping
from cascade_train.engine.loss_charts import LossCurve, LossPlot
from cascade_train.engine.metrics import MetricsLog
from cascade_train.engine.phase import BoundPhase, gather_samples, restore_training_state, sum_totals, training_state
from cascade_train.engine.profiler import Profiler
from cascade_train.engine.progress import Progress
from cascade_train.engine.sampling import SampleGrid
from cascade_train.engine.tracking import Tracker
from cascade_train.engine.validation import Validation
from cascade_train.errors import Interrupted, RunError
from cascade_train.tasks.base import StepOutput, Task

log = logging.getLogger(__name__)


class Feed(Protocol):
    """The source of micro-batches; its position counts the steps yielded, never those prefetched.

    Attributes:
        excluded: keys of samples that others stand in for (`data.exclude`).
    """

    excluded: frozenset[str]

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield, per optimizer step, this rank's micro-batches, all of one shape."""

    def state_dict(self) -> dict[str, Any]:
        """Position, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Optimizer steps between actions; None = never."""

    log: int | None
    validate: int | None
    sample: int | None
    checkpoint: int | None


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Runs a task's phases over a feed, and saves, measures and shows the results. `restore` and `run` do the work.

    Attributes:
        step: optimizer steps taken.
        stopped: why and where `run` ended before the last step, in a sentence; None = it did not.
        timeout_seconds: how long a step waits for other ranks, from the second on, since the first may compile.
    """

    world: World
    task: Task
    phases: Sequence[BoundPhase]
    feed: Feed
    seed: int
    max_steps: int
    global_batch_size: int
    cadence: Cadence
    metrics: MetricsLog
    store: CheckpointStore
    tracker: Tracker
    progress: Progress
    profiler: Profiler
    validation: Validation | None
    sampling: SampleGrid | None
    loss_plot: LossPlot | None = None
    loss_curve: LossCurve | None = None
    unreadable: UnreadableList | None = None
    stopping: Stopping | None = None
    timeout_seconds: float | None = None
    stopped: str | None = field(default=None, init=False)
    step: int = field(default=0, init=False)
    samples_seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._withheld = torch.zeros((), dtype=torch.float32, device=self.world.device)  # as fused optimizers take it
        self._first_step, self._saved_step = 1, 0
        self._traces: list[Trace] = []

    def run(self) -> None:
        """Train to `max_steps`, or to an agreed stop. Collective."""
        feed = iter(self.feed)
        if self.sampling is not None and self.step == 0:
            self.show(self.sampling)
        if self.validation is not None and self.step == 0:
            self.metrics.record(0, 0, self.measure(self.validation))
            self.flush()
        self.metrics.start(self.samples_seen)
        while self.step < self.max_steps:
            if (micro_batches := self._next(feed)) is None:
                return self.stop()
            with self._limited_wait():
                values = self.train_step(micro_batches)
            self.store.prepare(lambda: training_state(self.phases, self.task))
            measured = self.validation is not None and self._due(self.cadence.validate)
            if self.validation is not None and measured:
                values |= self.measure(self.validation)
            self.metrics.record(self.step, self.samples_seen, values)
            drawn = self.sampling is not None and self._due(self.cadence.sample)
            if measured or drawn or self._due(self.cadence.log):
                self.flush()
            if self.sampling is not None and drawn:
                self.show(self.sampling)
            if self._due(self.cadence.checkpoint) or self.step == self.max_steps:
                self.save()
            self.profiler.step(self.step)
            if self._stop_is_agreed():
                return self.stop()
        self.store.wait()

    def train_step(self, micro_batches: Sequence[Batch]) -> dict[str, Tensor | float]:
        """Run every phase on one global batch and return what it measured, still on the device. Collective."""
        self.step += 1
        self.samples_seen += self.global_batch_size
        prepared = list(self._prepared(micro_batches)) if len(self.phases) > 1 else self._prepared(micro_batches)
        keys = tuple(key for batch in micro_batches for key in batch.keys)
        values: dict[str, Tensor | float] = {}
        report: dict[str, Tensor] = {}
        for phase in self.phases:
            if self.step < phase.phase.start_step:
                continue
            outputs = list(self._backward(phase, prepared, len(micro_batches)))
            gathered = gather_samples(outputs)
            norm = phase.clip(self.step, self.max_steps)
            self._trace(Trace(self.step, phase.phase.name, keys, gathered["loss"], norm))
            rates = phase.update(self.step, self.max_steps, self._withheld)
            prefix = "" if phase is self.phases[0] else f"{phase.phase.name}/"
            means = {name: value.mean() for name, value in gathered.items() if value.ndim == 1 and name != "logsnr"}
            measured: dict[str, Tensor | float] = {**means, "grad_norm": norm, **rates}
            values |= {f"{prefix}{name}": value for name, value in measured.items()}
            report |= gathered | sum_totals(outputs)
        values |= self.task.after_step(report)
        if self.loss_plot is not None and "logsnr" in report:
            self.loss_plot.add(report["logsnr"], report["loss_raw"])
        return values

    def _next(self, feed: Iterator[list[Batch]]) -> list[Batch] | None:
        """The micro-batches of the next step; None where a stop signal ended the wait for them."""
        try:
            with self.metrics.waiting(), nullcontext() if self.stopping is None else self.stopping.ending_a_wait():
                return next(feed)
        except Interrupted:
            if self.world.ranks > 1:  # others may be in the step already
                log.warning("Rank %d waited for data in vain: the step before it is not saved.", self.world.rank)
                raise
            return None
        except StopIteration:
            message = f"The data ended at step {self.step} of {self.max_steps}: a feed must repeat its epochs."
            raise RunError(message) from None

    def _prepared(self, micro_batches: Sequence[Batch]) -> Iterator[Any]:
        """Prepare each micro-batch before the one in front of it trains: its copies are under way, the rest wait."""
        ahead = self.task.prepare_batch(micro_batches[0])
        for batch in micro_batches[1:]:
            now, ahead = ahead, self.task.prepare_batch(batch)
            yield now
        yield ahead

    def _backward(self, phase: BoundPhase, prepared: Iterable[Any], count: int) -> Iterator[StepOutput]:
        """Accumulate gradients of the mean loss over the global batch, and yield the outputs.

        FSDP averages over the ranks, hence the factor ranks / global batch on the sum of the samples' losses.
        """
        scale = self.world.ranks / self.global_batch_size
        for micro, batch in enumerate(prepared):
            set_gradient_sync(phase.roots, micro == count - 1)
            seed_micro_batch(self.seed, step=self.step, micro=micro, rank=self.world.rank)
            output = phase.phase.loss(batch)
            (output.loss_B.sum() * scale).backward()
            yield output

    def _trace(self, trace: Trace) -> None:
        """Withhold this and all later updates once a loss or norm is not finite.

        The flag stays on the device; the host reads it at the next flush, or at once where reading costs nothing. An
        optimizer that takes no flag spoils its weights until then: what follows a flush that raises reads checkpoints
        alone, and each checkpoint, picture and row of metrics is flushed first.
        """
        self._withheld = torch.maximum(self._withheld, (~trace.is_finite()).to(self._withheld.dtype))
        self._traces.append(trace)
        if self.world.device.type == "cpu":
            self.stop_if_bad()

    def stop_if_bad(self) -> None:
        """Raise where an update was withheld. Collective then.

        Raises:
            RunError: names the step, the phase, and rank and key of each sample at fault.
        """
        if bool(self._withheld):
            bad = next(trace for trace in self._traces if not bool(trace.is_finite()))
            raise not_finite(bad, excluded=self.feed.excluded)

    def flush(self) -> None:
        """Bring the steps since the last flush to the host: metrics file, tracker, progress. The one host sync."""
        self.stop_if_bad()
        self._traces.clear()
        for row in self.metrics.flush():
            self.tracker.log(row, row["step"])
            self.progress.update(row)
        self._report()

    def _report(self, *, last: bool = False) -> None:
        """List unreadable samples, and log the task's notices."""
        if self.unreadable is not None:
            self.unreadable.write(self.step)
        for notice in self.task.notices(last=last) if self.world.is_main else ():
            log.warning("%s%s", "In all, " if last else "", notice)

    def measure(self, validation: Validation) -> dict[str, Tensor | float]:
        """Losses on held-out samples; at every fourth validation and the last also by noise level. Collective."""
        number = self.step // (self.cadence.validate or 1)
        with self.metrics.paused():
            return validation.run(curve=number % 4 == 0 or self.step == self.max_steps)

    def show(self, sampling: SampleGrid) -> None:
        """Draw the fixed samples and the loss by noise level, and send them to the tracker. Collective."""
        with self.metrics.paused():
            plots = [] if self.loss_plot is None else self.loss_plot.draw(self.step)
            for path in [*sampling.draw(self.step), *plots]:
                self.tracker.log_image(path.stem, path, self.step)

    def save(self) -> None:
        """Write a checkpoint of this step, after everything before it is on disk. Collective."""
        self.flush()
        self._saved_step = self.step
        begun = time.monotonic()
        with self.metrics.paused():
            self.store.save(self.step, training_state(self.phases, self.task), self._facts())
            if self.loss_curve is not None:
                self.loss_curve.draw()
        if self.stopping is not None:
            self.stopping.limit.end_save(time.monotonic() - begun)

    def stop(self) -> None:
        """Save this step unless that is done, and report why the run ends here. Collective."""
        assert self.stopping is not None
        if self._saved_step != self.step:
            self.save()
        self.store.wait()
        where = f"at step {self.step}; saved" if self.step else "before the first step"
        self.stopped = f"Stopped by {self.stopping.agreed_reason()} {where}."
        self.tracker.note(self.stopped)
        self.tracker.alert("Stopped", self.stopped)
        log.info("%s The same command continues.", self.stopped)

    def close(self) -> None:
        """Finish the unfinished save, the list of unreadable samples, progress line, profiler and tracker."""
        self.store.close()
        self._report(last=True)
        self.progress.close()
        self.profiler.close()
        self.tracker.finish()

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint. Collective."""
        facts = restore_training_state(self.store, path, self.phases, self.task)
        self.feed.load_state_dict(facts["data"])
        self.step, self.samples_seen = facts["step"], facts["samples_seen"]
        self._first_step, self._saved_step = self.step + 1, self.step
        self.tracker.rewind(self.step)
        log.info("Continuing at step %d from %s.", self.step, path)

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples_seen": self.samples_seen,
            "finished": self.step == self.max_steps,
            "max_steps": self.max_steps,
            "data": self.feed.state_dict(),
            "tracker_run_id": self.tracker.run_id,
        }

    def _limited_wait(self) -> AbstractContextManager[None]:
        """Limit how long the next step waits for other ranks."""
        if self.timeout_seconds is None or self.step < self._first_step:
            return nullcontext()
        return step_timeout(groups_of(root for phase in self.phases for root in phase.roots), self.timeout_seconds)

    def _stop_is_agreed(self) -> bool:
        """Vote on what any rank asks of all. Collective."""
        if self.stopping is None:
            return False
        agreed = self.stopping.vote(save_failed=self.store.failed, save_seconds=self.store.save_seconds)
        if Request.SAVE_FAILED in agreed:
            self.store.wait()
        return Request.STOP in agreed and self.step < self.max_steps

    def _due(self, every_steps: int | None) -> bool:
        return every_steps is not None and (self.step % every_steps == 0 or self.step == self.max_steps)
