"""The typed nodes of the configuration: everything the one loop owns.

Types, ranges and units live here and, of what only looks at a run, in schema_watching.py; the values live in `conf/`.
Components (`_target_` nodes) do not belong here: their constructor is their schema. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cascade_train.config.limits import above, at_least
from cascade_train.config.schema_watching import LogConfig, ProfileConfig, SampleConfig, TrackerConfig, ValidateConfig
from cascade_train.errors import ConfigError


class Precision(StrEnum):
    """Number format of the compute; trainable weights are fp32 masters in every one of them."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class ParallelMode(StrEnum):
    """How the ranks share the work."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class Compile(StrEnum):
    """What torch.compile sees: nothing, or one unit of the network at a time."""

    off = "off"
    regional = "regional"


class Attention(StrEnum):
    """Attention kernel of the network."""

    sdpa = "sdpa"
    xformers = "xformers"
    math = "math"


class EmaDevice(StrEnum):
    """Where the average of the weights is kept; null = beside the weights."""

    cpu = "cpu"


class BestMode(StrEnum):
    """Whether small or large values of a metric are good."""

    min = "min"
    max = "max"


@dataclass(kw_only=True)
class RunConfig:
    """Identity of a run, where it lives, and what it may load."""

    name: str
    """Name of the run, one folder name; default `<task>-<model>`."""
    dir: str
    """Folder of everything that the run leaves behind."""
    seed: int
    """Seed of every random choice of the run."""
    resume: str
    """auto = the newest whole checkpoint in `run.dir`, never, or the path of a checkpoint."""
    allowed_packages: list[str]
    """Top-level packages that a `_target_` may name."""
    allow_any_target: bool
    """Let a `_target_` name any package; runs code that the YAML names."""
    deterministic: bool
    """Choose deterministic kernels, slower."""
    max_hours: float | None
    """Save and end before the job is this old, counted from the start of its processes; null = no limit."""
    timeout_seconds: float
    """How long a step waits for a rank that hangs, from the second step on."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in {".", ".."}:
            raise ConfigError(f"run.name={self.name!r} must be one folder name. Set the folder itself by run.dir.")
        if not self.dir:
            raise ConfigError("run.dir='' must name a folder, e.g. run.dir=runs/mine.")
        at_least("run.seed", self.seed, 0)
        above("run.max_hours", self.max_hours, 0.0)
        at_least("run.timeout_seconds", self.timeout_seconds, 1.0)


@dataclass(kw_only=True)
class TrainConfig:
    """Length, batch and number format of the training. A step is an optimizer step."""

    max_steps: int
    """Optimizer steps in all."""
    max_epochs: int | None
    """Passes over the data, whichever of the two ends first; null = no limit."""
    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: int | None
    """Samples that one rank holds at once; null = global_batch_size / ranks, without accumulation."""
    max_grad_norm: float | None
    """Global gradient norm above which gradients are scaled down; null = off."""
    precision: Precision
    """bf16, fp32, or auto = the precision that the model is meant for (bf16, and fp32 for tiny models)."""

    def __post_init__(self) -> None:
        at_least("train.max_steps", self.max_steps, 1)
        at_least("train.max_epochs", self.max_epochs, 1)
        at_least("train.global_batch_size", self.global_batch_size, 1)
        at_least("train.micro_batch_size", self.micro_batch_size, 1)
        above("train.max_grad_norm", self.max_grad_norm, 0.0)


@dataclass(kw_only=True)
class EmaConfig:
    """Exponential moving average of the trained weights, in fp32."""

    decay: float | None
    """Weight of the old average in each update, in (0, 1); null = no average."""
    start_step: int
    """First optimizer step that is averaged."""
    every_steps: int
    """Optimizer steps between updates."""
    device: EmaDevice | None
    """cpu = in host memory; null = beside the weights."""
    weights: str | None = None
    """What the average starts from, in any format of model.weights; null = the weights that train."""

    def __post_init__(self) -> None:
        if self.weights is not None and (self.decay is None or self.start_step > 0):
            raise ConfigError(
                f"ema.weights={self.weights} has no effect: until ema.start_step={self.start_step} the average is"
                f" a copy of the weights, and with ema.decay={self.decay} there may be none. Set ema.start_step=0 and a"
                " decay, e.g. ema.decay=0.999, or ema.weights=null."
            )
        if self.decay is not None and not 0.0 < self.decay < 1.0:
            raise ConfigError(f"ema.decay={self.decay} must lie between 0 and 1, e.g. 0.999; null switches it off.")
        at_least("ema.start_step", self.start_step, 0)
        at_least("ema.every_steps", self.every_steps, 1)


@dataclass(kw_only=True)
class ParallelConfig:
    """How the ranks share weights and work."""

    mode: ParallelMode
    """auto = single alone, ddp where the training state fits a device, else fsdp."""
    shard_size: int | None
    """Ranks that share one copy of the weights; null = those of one machine. hsdp only."""
    reshard_after_forward: bool
    """Free gathered weights between forward and backward: less memory, more traffic."""
    cpu_offload: bool
    """Keep the shards and the optimizer on the host: least device memory, slowest; on a CUDA device only."""

    def __post_init__(self) -> None:
        at_least("parallel.shard_size", self.shard_size, 1)


@dataclass(kw_only=True)
class CheckpointConfig:
    """When the state of the run is saved, and which saves stay."""

    every_steps: int | None
    """Optimizer steps between checkpoints; null = only the final one."""
    keep_last: int | None
    """Newest checkpoints that stay; null = all."""
    keep_every_steps: int | None
    """Checkpoints at multiples of this step stay for good; null = none."""
    keep_best: int | None = None
    """Checkpoints with the best `best_metric` that stay too; null = none."""
    best_metric: str | None = None
    """What they are ranked by: a key of `metrics.jsonl`, such as validate/loss."""
    best_mode: BestMode = BestMode.min
    """min = small values are good, or max."""
    keep_optimizer: bool = True
    """false = those that do not stay for being new lose their optimizer state; no run continues from them."""
    asynchronous: bool = True
    """Train on once the state is copied to the host, while a thread writes it; false = wait for the disk."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every_steps", self.every_steps, 1)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_every_steps", self.keep_every_steps, 1)
        at_least("checkpoint.keep_best", self.keep_best, 1)
        if (self.keep_best is None) != (self.best_metric is None):
            raise ConfigError(
                f"checkpoint.keep_best={self.keep_best} and checkpoint.best_metric={self.best_metric} belong together."
                " Set both, e.g. checkpoint.keep_best=3 checkpoint.best_metric=validate/loss, or neither."
            )
        if self.keep_last is None and (self.keep_best is not None or not self.keep_optimizer):
            key = "keep_best" if self.keep_best is not None else "keep_optimizer"
            raise ConfigError(
                f"checkpoint.{key} has no effect with checkpoint.keep_last=null: all checkpoints stay as they are."
                " Set checkpoint.keep_last, e.g. checkpoint.keep_last=2."
            )


@dataclass(kw_only=True)
class RollbackConfig:
    """Going back to the newest checkpoint after a bad step, without the samples at fault."""

    enabled: bool
    """Go back; false = a loss or gradient norm that is not finite ends the run."""
    spike_factor: float | None
    """A mean loss of more than this times the running median is bad too; null = only what is not finite."""
    window_steps: int
    """Optimizer steps of that median; nothing is judged by it before so many are known."""
    max_times: int
    """Rollbacks of a run in all; after these a bad step ends it."""

    def __post_init__(self) -> None:
        above("rollback.spike_factor", self.spike_factor, 1.0)
        at_least("rollback.window_steps", self.window_steps, 1)
        at_least("rollback.max_times", self.max_times, 1)
        if self.spike_factor is not None and not self.enabled:
            raise ConfigError(
                f"rollback.spike_factor={self.spike_factor} has no effect without rollback.enabled=true. Set both, or"
                " rollback.spike_factor=null."
            )


@dataclass(kw_only=True)
class Root:
    """The whole configuration; fields typed Any are components, chosen by the group of the same name."""

    model: Any
    task: Any
    objective: Any
    data: Any
    optimizer: Any
    lr_scheduler: Any
    run: RunConfig
    train: TrainConfig
    ema: EmaConfig
    parallel: ParallelConfig
    activation_checkpointing: bool
    """Recompute activations in backward: less memory, about a third more compute."""
    compile: Compile
    """What torch.compile sees."""
    attention: Attention
    """Attention kernel of the network."""
    log: LogConfig
    checkpoint: CheckpointConfig
    rollback: RollbackConfig
    sample: SampleConfig
    validate: ValidateConfig
    profile: ProfileConfig
    tracker: TrackerConfig


COMPONENTS = ("model", "task", "objective", "data", "optimizer", "lr_scheduler")
"""Root keys that hold a component and are chosen by the group of the same name."""
