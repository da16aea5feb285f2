"""What `cascade-train plan` reports: parameters, memory, length, time and disk of a run, and warnings.

Must not live here: how memory is computed (memory.py, memory_trace.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from cascade_train.assembly.planning.devices import ASSUMED_MFU, DEVICES, SIZES_GB, TF32_SHARE, USABLE, Budget, as_gb
from cascade_train.assembly.planning.memory import Memory, changed, divisors, memory_of, over_ranks
from cascade_train.assembly.planning.samples import Samples, look
from cascade_train.assembly.planning.strategies import choose, too_large
from cascade_train.config.groups import typed_keys

RANKS = (1, 2, 4, 8)
MACHINE_RANKS = 8
"""GPUs of a machine, for `parallel=hsdp`. Assumed."""

SAVE_SECONDS = (600.0, 4 * 3600.0)
"""Between saves: oftener is much writing, seldomer is much to lose."""


MANY_SAVES = 1000
"""Checkpoints of a run where their number is unknown."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before it begins, in bytes, seconds, and numbers of parameters and samples.

    Attributes:
        title: the run, in a line.
        parameters: of each module, all and those that train.
        memory: by number of ranks that divide the batch, of one of them at its peak, by label.
        micro_batch_size: of the run; by number of ranks, as it is or as it would be.
        fits: the largest micro-batch that divides a rank's share of the batch and fits the device; None = none does.
        largest: by number of ranks and gigabytes of a device, the largest micro-batch that fits; None = none does.
        steps: optimizer steps.
        samples: of the data.
        tflop: of a sample, forward and backward, encoders too.
        seconds_per_step: at the assumed share of the device's peak.
        device: its name.
        tflops: its peak in TFLOP/s at the precision of the run.
        ranks: of the run.
        checkpoint_bytes: of one checkpoint.
        checkpoints: that stay.
        disk_bytes: of these.
        export_bytes: of what trained.
        warnings: sentences.
        chosen: what `memory` chose.
        host_bytes: of each rank in the memory of its host: copies for asynchronous saves; averages there, each kind
            with a copy of the weights; offloaded weights and their state.
    """

    title: str
    parameters: Mapping[str, tuple[int, int]]
    memory: Mapping[int, Mapping[str, int]]
    micro_batch_size: Mapping[int, int]
    fits: int | None
    largest: Mapping[int, Mapping[int, int | None]]
    steps: int | None
    global_batch_size: int
    samples: Samples
    tflop: float
    seconds_per_step: float
    device: str
    tflops: float
    ranks: int
    checkpoint_bytes: int
    checkpoints: int
    disk_bytes: int
    export_bytes: int
    warnings: Sequence[str]
    chosen: str | None = None
    host_bytes: int = 0

    def __str__(self) -> str:
        """Plan as text."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the plan as lines of text."""
        yield self.title
        yield from () if self.chosen is None else (self.chosen,)
        yield from ("", *_table(["Parameters", "all", "train"], self._parameter_rows()))
        heads = ["GB of each rank at its peak", *(f"{n} rank{'s' if n > 1 else ''}" for n in self.memory)]
        yield from ("", *_table(heads, self._memory_rows()))
        heads = ["Largest micro-batch on", *(f"{gb} GB" for gb in SIZES_GB)]
        rows = [[f"  {n} rank{'s' if n > 1 else ''}", *(str(row[gb] or "-") for gb in SIZES_GB)]
                for n, row in self.largest.items()]  # fmt: skip
        yield from ("", *_table(heads, rows), "", *self._length_lines(), *self._disk_lines())
        yield from ("", *(f"! {warning}" for warning in self.warnings)) if self.warnings else ()
        yield from ("", ASSUMPTIONS)

    def _parameter_rows(self) -> list[list[str]]:
        rows = [[f"  {name}", f"{whole:,}", f"{trains:,}"] for name, (whole, trains) in self.parameters.items()]
        sums = [sum(each) for each in zip(*self.parameters.values(), strict=True)]
        return [*rows, ["  together", *(f"{each:,}" for each in sums)]]

    def _memory_rows(self) -> list[list[str]]:
        columns = self.memory.values()
        names = dict.fromkeys(name for column in columns for name in column)
        shown = [name for name in names if any(column.get(name, 0) >= 5 * 10**6 for column in columns)]
        rows = [[f"  {name}", *(as_gb(column.get(name, 0)) for column in columns)] for name in shown]
        sizes = [str(self.micro_batch_size[n]) for n in self.memory]
        return [["  micro-batch", *sizes], *rows, ["  together", *(as_gb(sum(c.values())) for c in columns)]]

    def _length_lines(self) -> Iterator[str]:
        if self.steps is None:
            yield f"Length   not known without its data, in steps of {self.global_batch_size:,}"
        else:
            samples = self.steps * self.global_batch_size
            yield f"Length   {self.steps:,} steps of {self.global_batch_size:,}: {samples:,} samples"
        yield from (f"Data     {line}" for line in self.samples.lines(self.steps))
        whole = "" if self.steps is None else f", {_duration(self.seconds_per_step * self.steps)} in all"
        yield (
            f"Time     {_duration(self.seconds_per_step)} a step{whole}, on {self.ranks} x"
            f" {self.device} at {ASSUMED_MFU:.0%} of {self.tflops:g} TFLOP/s (assumed);"
            f" {self.tflop:.4g} TFLOP a sample"
        )

    def _disk_lines(self) -> Iterator[str]:
        if self.host_bytes:
            yield (
                f"Host     {as_gb(self.host_bytes)} GB of each rank: copies for asynchronous saves, and averages or"
                " weights that lie there; its data workers take more"
            )
        what = "checkpoint" if self.checkpoints == 1 else "checkpoints"
        yield (
            f"Disk     {as_gb(self.disk_bytes)} GB: {self.checkpoints} {what} of {as_gb(self.checkpoint_bytes)} GB"
            f" that stay, one more while saving; {as_gb(self.export_bytes)} GB of trained weights in the export"
        )


ASSUMPTIONS = (
    "Memory is computed from the run's own step, not measured: tensors in blocks of 512 bytes, and 0.6 GB assumed for\n"
    "the CUDA context and workspaces. The allocator's fragments, sampling, validation and the networks of filters are\n"
    "not counted; compile=regional counts as no compilation, and every image as a condition."
)


def make_plan(cfg: DictConfig, *, ranks: int, device: str, opens_data: bool) -> Plan:
    """Plan of a checked configuration on a number of ranks of a device."""
    samples = look(cfg, ranks=ranks) if opens_data else Samples(notes=["not opened"])
    gb = DEVICES[device].gb
    budget = Budget(gb=gb, ranks=ranks, machine_ranks=min(ranks, MACHINE_RANKS), kept=typed_keys())
    choice = choose(cfg, budget)
    chosen = None if cfg.memory.budget_gb is None else f"memory={cfg.memory.budget_gb} chose {choice}"
    warnings = [] if choice.fits else [too_large(cfg, choice, budget)]
    cfg = changed(cfg, choice.values)
    memory, trace = memory_of(cfg)
    batch, given = cfg.train.global_batch_size, cfg.train.micro_batch_size
    micro = {n: size for n in sorted({*RANKS, ranks}) if (size := _micro(batch, given, n))}
    layouts = {n: over_ranks(cfg, memory, n, machine_ranks=min(n, MACHINE_RANKS), device_gb=gb) for n in micro}
    peaks = {n: layouts[n].peak(size, batch // n // size) for n, size in micro.items()}
    every = _between_saves(cfg, samples)
    newest, older = _kept(changed(cfg, {"checkpoint.every_steps": every}), _steps(cfg, samples))
    tflops = DEVICES[device].tflops * (1.0 if cfg.train.precision.value == "bf16" else TF32_SHARE)
    per_step = (trace.flops * batch / ranks + trace.update_flops) / (tflops * 1e12 * ASSUMED_MFU)
    plan = Plan(
        title=f"{cfg.run.name}: {_name(cfg.task)} of {_name(cfg.model)}, {cfg.model.image_size} px,"
        f" {cfg.train.precision.value}, parallel={cfg.parallel.mode.value}"
        + (", activation_checkpointing" if cfg.activation_checkpointing else ""),
        parameters=trace.parameters,
        memory=peaks,
        micro_batch_size=micro,
        fits=layouts[ranks].largest(budget.usable_bytes(), divisors(batch // ranks), batch // ranks),
        largest={n: _largest(layouts[n], batch // n) for n in micro},
        steps=_steps(cfg, samples),
        global_batch_size=batch,
        samples=samples,
        tflop=trace.flops / 1e12,
        seconds_per_step=per_step,
        device=device,
        tflops=tflops,
        ranks=ranks,
        checkpoint_bytes=trace.checkpoint_bytes,
        checkpoints=newest + older,
        disk_bytes=(newest + older) * trace.checkpoint_bytes,
        export_bytes=trace.export_bytes,
        warnings=(),
        chosen=chosen,
        host_bytes=layouts[ranks].host_bytes(),
    )
    warnings += _warnings(cfg, plan, every)
    return dataclasses.replace(plan, warnings=tuple(warnings))


def _micro(batch: int, own: int, ranks: int) -> int | None:
    """Largest micro-batch size up to the run's own; None = none divides."""
    share, rest = divmod(batch, ranks)
    return None if rest else max(size for size in divisors(share) if size <= own)


def _largest(memory: Memory, share: int) -> dict[int, int | None]:
    """Largest micro-batch size that fits each of `SIZES_GB`."""
    return {gb: memory.largest(gb * 1e9 * USABLE, range(1, share + 1), share) for gb in SIZES_GB}


def _steps(cfg: DictConfig, samples: Samples) -> int | None:
    """Optimizer steps of a run, without its data by limits alone; None = unknown."""
    if samples.steps is not None:
        return samples.steps
    seen = cfg.data.get("num_examples_to_see")
    limits = [cfg.train.max_steps, None if seen is None else -(-seen // cfg.train.global_batch_size)]
    return min((limit for limit in limits if limit is not None), default=None)


def _between_saves(cfg: DictConfig, samples: Samples) -> int | None:
    """Steps between checkpoints; None = there is only the final one."""
    rule = cfg.checkpoint
    if rule.every_epochs is None or samples.saved_steps is not None:
        return rule.every_steps if rule.every_epochs is None else samples.saved_steps
    return None if rule.keep_last is None else max(1, (_steps(cfg, samples) or MANY_SAVES) // MANY_SAVES)


def _kept(cfg: DictConfig, steps: int | None) -> tuple[int, int]:
    """How many checkpoints stay for being new, and how many at most else."""
    rule = cfg.checkpoint
    if steps is None:
        return rule.keep_last or 1, rule.keep_best or 0
    every = rule.every_steps or steps
    regular, is_between = divmod(steps, max(1, every))
    saved = regular + bool(is_between)
    newest = saved if rule.keep_last is None else min(saved, rule.keep_last)
    older = saved - newest
    multiples = 0 if rule.keep_every_steps is None else every * older // math.lcm(every, rule.keep_every_steps)
    return newest, min(older, multiples + (rule.keep_best or 0))


def _warnings(cfg: DictConfig, plan: Plan, every: int | None) -> Iterator[str]:
    undivided = [str(n) for n in RANKS if plan.global_batch_size % n]
    if undivided:
        yield f"train.global_batch_size={plan.global_batch_size} cannot be split over {' or '.join(undivided)} ranks."
    epochs = cfg.checkpoint.every_epochs
    between_saves = None if every is None else every * plan.seconds_per_step
    if epochs is not None and plan.samples.saved_steps is None:
        counted = "one is" if every is None else "all that may stay are"
        yield f"checkpoint.every_epochs={epochs}: its data is not known here; of the checkpoints {counted} counted."
    elif between_saves and plan.checkpoint_bytes > 1e9 and not SAVE_SECONDS[0] <= between_saves <= SAVE_SECONDS[1]:
        key = f"every_steps={every}" if epochs is None else f"every_epochs={epochs}"
        yield f"checkpoint.{key} saves {as_gb(plan.checkpoint_bytes)} GB every {_duration(between_saves)}."
    if cfg.train.max_epochs is not None and plan.samples.steps is None:
        ends = "may end the run before" if plan.steps else "ends the run, whose newest and best checkpoints are counted"
        yield f"train.max_epochs={cfg.train.max_epochs} {ends}: its data is not known here."
    yield from plan.samples.warnings(plan.global_batch_size)
    if cfg.compile.value == "regional":
        yield "compile=regional needs less memory than is counted here."


def _name(node: Any) -> str:
    return str(node._target_).rpartition(".")[2]


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        yield "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
