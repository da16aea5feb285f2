"""The typed nodes of the configuration: everything the one loop owns. Nothing here imports torch.

Types, ranges and units live here, those of what a run saves and shows in schema_outputs.py, the values in `conf/`. The
schema of a component (`_target_`) is its constructor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from cascade_train.config.schema_outputs import (
    CheckpointConfig,
    LogConfig,
    ProfileConfig,
    SampleConfig,
    TrackerConfig,
    ValidateConfig,
)
from cascade_train.errors import ConfigError
from cascade_train.options import check_length, limit, number_or_auto

Precision = StrEnum("Precision", ["auto", "bf16", "fp32"])
MasterWeights = StrEnum("MasterWeights", ["fp32", "bf16"])
BaseWeights = StrEnum("BaseWeights", ["int8"])
ParallelMode = StrEnum("ParallelMode", ["auto", "single", "ddp", "fsdp", "hsdp"])
Compile = StrEnum("Compile", ["off", "regional"])
Attention = StrEnum("Attention", ["sdpa", "xformers", "math"])
EmaDevice = StrEnum("EmaDevice", ["cpu"])


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
        limit(self, "run", "seed", least=0)
        limit(self, "run", "max_hours", above=0.0)
        limit(self, "run", "timeout_seconds", least=1.0)


@dataclass(kw_only=True)
class TrainConfig:
    """Length, batch and number format of the training. A step is an optimizer step."""

    max_steps: int | None
    """Optimizer steps in all; null = no limit."""
    max_epochs: int | None
    """Passes over the data, whichever of the two ends first; null = no limit."""
    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: Any
    """Samples that one rank holds at once; null = global_batch_size / ranks, without accumulation; auto = the most that
    divide a rank's share and fit its device, by computed peaks."""
    max_grad_norm: float | None
    """Global gradient norm above which gradients are scaled down; null = off."""
    precision: Precision
    """bf16, fp32, or auto = the precision that the model is meant for (bf16, and fp32 for tiny models)."""
    master_weights: MasterWeights = MasterWeights.fp32
    """Format that a network that trains is kept in: fp32, or bf16 with updates that are rounded stochastically: 6 bytes
    less a parameter."""
    base_weights: BaseWeights | None = None
    """Format of the linear layers of a network that is frozen, below adapters or beside a control network: int8 = codes
    with a scale for each 64 numbers of a row; null = that of compute."""

    def __post_init__(self) -> None:
        number_or_auto(self, "train", "micro_batch_size", int)
        limit(self, "train", "max_steps", "max_epochs", "global_batch_size", "micro_batch_size", least=1)
        limit(self, "train", "max_grad_norm", above=0.0)


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
    ramp: bool
    """Begin with a short average, so that a short run keeps little of its first weights: update n, counted from 0, has
    a decay of at most (1 + n) / (10 + n); without effect beside ema.weights. false = ema.decay from the first on."""
    weights: str | None = None
    """What the average starts from, in any format of model.weights; null = the weights that train."""
    post_hoc: list[float] | None = None
    """Lengths of averages that checkpoints keep, to build one of any length afterwards by `export average=`: standard
    deviations of the steps averaged, relative to all steps, e.g. [0.05,0.1]; null = none."""

    def __post_init__(self) -> None:
        if self.weights is not None and (self.decay is None or self.start_step > 0):
            raise ConfigError(
                f"ema.weights={self.weights} has no effect: until ema.start_step={self.start_step} the average is"
                f" a copy of the weights, and with ema.decay={self.decay} there may be none. Set ema.start_step=0 and a"
                " decay, e.g. ema.decay=0.999, or ema.weights=null."
            )
        if self.decay is not None and not 0.0 < self.decay < 1.0:
            raise ConfigError(f"ema.decay={self.decay} must lie between 0 and 1, e.g. 0.999; null switches it off.")
        if self.post_hoc is not None:
            self._check_post_hoc(sorted(self.post_hoc))
        limit(self, "ema", "start_step", least=0)
        limit(self, "ema", "every_steps", least=1)

    def _check_post_hoc(self, lengths: list[float]) -> None:
        for length in lengths:
            check_length("ema.post_hoc", length)
        if not lengths or any(longer < 1.1 * length for length, longer in pairwise(lengths)):
            raise ConfigError(
                f"ema.post_hoc={self.post_hoc} must be lengths of which each is at least a tenth longer than the one "
                "before, e.g. [0.05,0.1]; or null. The difference of nearly equal ones is rounding."
            )
        if self.every_steps != 1:
            raise ConfigError(
                f"ema.every_steps={self.every_steps} must be 1 with ema.post_hoc, whose averages weigh every step. Set"
                " it to 1, or ema.post_hoc=null."
            )


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
        limit(self, "parallel", "shard_size", least=1)


@dataclass(kw_only=True)
class MemoryConfig:
    """Choosing what fits a device by computed peaks, before anything is loaded."""

    budget_gb: Any = None
    """GB (10^9 bytes) of a device that the training is made to fit, by means that the command line leaves open; auto =
    the device's own; null = nothing is chosen."""

    def __post_init__(self) -> None:
        number_or_auto(self, "memory", "budget_gb", float)
        limit(self, "memory", "budget_gb", above=0.0)


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
    sample: SampleConfig
    validate: ValidateConfig
    profile: ProfileConfig
    tracker: TrackerConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compile_fallback: bool = False
    """Run without compilation what needs more graphs than expected, instead of ending the run."""


COMPONENTS = ("model", "task", "objective", "data", "optimizer", "lr_scheduler")
"""Root keys that hold a component and are chosen by the group of the same name."""
