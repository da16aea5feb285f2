"""The typed nodes of the configuration: everything the one loop owns. Nothing here imports torch.

Types, ranges and units live here, the values in `conf/`. The schema of a component (`_target_`) is its constructor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cascade_train.config.limits import check_length, limit, number_or_auto
from cascade_train.errors import ConfigError

Precision = StrEnum("Precision", ["auto", "bf16", "fp32"])
MasterWeights = StrEnum("MasterWeights", ["fp32", "bf16"])
BaseWeights = StrEnum("BaseWeights", ["int8"])
ParallelMode = StrEnum("ParallelMode", ["auto", "single", "ddp", "fsdp", "hsdp"])
Compile = StrEnum("Compile", ["off", "regional"])
Attention = StrEnum("Attention", ["sdpa", "xformers", "math"])
EmaDevice = StrEnum("EmaDevice", ["cpu"])
BestMode = StrEnum("BestMode", ["min", "max"])
SamplerName = StrEnum("SamplerName", ["ddpm", "ddim", "lcm"])
TrackerName = StrEnum(
    "TrackerName",
    ["none", "aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"],
)
TrackerMode = StrEnum("TrackerMode", ["online", "offline"])


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
    on_end: str | None = None
    """Shell command that rank 0 runs, for 20 s at most, when the run has finished, stopped or failed; it reads what
    happened in `CASCADE_TRAIN_EVENT`, `_RUN_DIR`, `_STEP` and `_MESSAGE`; null = none."""

    def __post_init__(self) -> None:
        if self.on_end is not None and not self.on_end.strip():
            raise ConfigError("run.on_end='' must name a command, e.g. run.on_end=./notify.sh; null for none.")
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
        for length in self.post_hoc or ():
            check_length("ema.post_hoc", length)
        if self.post_hoc is not None and len(set(self.post_hoc)) != max(len(self.post_hoc), 1):
            raise ConfigError(f"ema.post_hoc={self.post_hoc} must be different lengths, e.g. [0.05,0.1]; or null.")
        limit(self, "ema", "start_step", least=0)
        limit(self, "ema", "every_steps", least=1)


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
    allow_overflow: bool = False
    """Has no effect: no start is refused for its computed peak. Accepted for commands of earlier versions."""

    def __post_init__(self) -> None:
        number_or_auto(self, "memory", "budget_gb", float)
        limit(self, "memory", "budget_gb", above=0.0)


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
    """What they are ranked by: a key of `metrics.jsonl`, such as validate/loss, or of `evaluation.jsonl`, such as
    evaluate/fid, which counts at saves after it was found."""
    best_mode: BestMode = BestMode.min
    """min = small values are good, or max."""
    every_epochs: int | None = None
    """Epochs between checkpoints, in whole steps, in place of every_steps; null = those count."""
    keep_optimizer: bool = True
    """false = those that do not stay for being new lose their optimizer state; no run continues from them."""
    asynchronous: bool = True
    """Train on once the state is copied to the host, while a thread writes it; false = wait for the disk."""

    def __post_init__(self) -> None:
        limit(self, "checkpoint", "every_steps", "keep_last", "keep_every_steps", "keep_best", "every_epochs", least=1)
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
    """Optimizer steps of that median; until that many have run, no loss is a spike."""
    max_times: int
    """Rollbacks of a run in all; after these a bad step ends it."""

    def __post_init__(self) -> None:
        limit(self, "rollback", "spike_factor", above=1.0)
        limit(self, "rollback", "window_steps", "max_times", least=1)
        if self.spike_factor is not None and not self.enabled:
            factor = f"rollback.spike_factor={self.spike_factor}"
            raise ConfigError(f"{factor} has no effect without rollback.enabled=true. Set both, or the factor to null.")


@dataclass(kw_only=True)
class LogConfig:
    """The progress line and the flush of `metrics.jsonl`."""

    every_steps: int | None
    """Optimizer steps between lines; null = none, and metrics are written at checkpoints and at the end."""

    def __post_init__(self) -> None:
        limit(self, "log", "every_steps", least=1)


@dataclass(kw_only=True)
class SampleConfig:
    """The grid of sampled images."""

    every_steps: int | None
    """Optimizer steps between grids; null = none."""
    prompts: Any
    """What to draw: a list, or @file with a prompt in each line (txt) or row (csv, tsv, jsonl, parquet; @file:column),
    read when the run begins; null = captions of held-out samples, or of the first."""
    count: int
    """Images of a grid where `prompts` is null."""
    seed: int
    """Seed of the sampling noise."""
    sampler: SamplerName
    """Reverse process."""
    steps: int
    """Network evaluations per image, without counting guidance twice."""
    guidance_scale: float | None
    """Classifier-free guidance; 1 = none; null = the stage's: 4 for C, 1.1 for B, as the original samples."""
    negative_prompt: str = ""
    """Caption that guidance leads away from, of all images; "" = the empty one, as in training."""
    shift: float
    """logSNR shift of the sampling schedule, -2 ln(shift); 1 = none."""

    def __post_init__(self) -> None:
        limit(self, "sample", "every_steps", "count", "steps", least=1)
        limit(self, "sample", "seed", "guidance_scale", least=0)
        limit(self, "sample", "shift", above=0.0)
        if isinstance(self.prompts, dict):
            raise ConfigError(f"sample.prompts={self.prompts} must be a list of texts, or @file.")
        if self.prompts is not None and not self.prompts:
            raise ConfigError("sample.prompts=[] names nothing to draw. Use null for captions of the data.")


@dataclass(kw_only=True)
class ValidateConfig:
    """Loss on held-out samples at fixed noise levels, with fixed noise."""

    every_steps: int | None
    """Optimizer steps between validations; null = none."""
    share: float | None
    """Share of the samples that is held out, chosen by a hash of their keys, in (0, 1); null = none."""
    urls: list[str] | None
    """Held-out set of its own, in place of `share`."""
    samples: int
    """Held-out samples of one validation."""
    logsnr: list[float]
    """Noise levels, natural logarithm of the signal-to-noise ratio."""
    reconstructions: int = 0
    """Held-out pictures that Stage B samples again, as `sample` says, to measure how near it comes; 0 = none."""
    lpips: str | None = None
    """A file of torchvision's VGG-16, to measure those by LPIPS too, and Stage A's; null = not measured."""
    rfid: str | None = None
    """A file of FID's Inception V3, to measure those and Stage A's by their Fréchet distance, too; null = not."""
    every_epochs: int | None = None
    """Epochs between validations, in whole steps, in place of every_steps; null = those count."""

    def __post_init__(self) -> None:
        limit(self, "validate", "every_steps", "samples", "every_epochs", least=1)
        limit(self, "validate", "reconstructions", least=0)
        for key, least in (("lpips", 1), ("rfid", 2)):
            if (file := getattr(self, key)) is not None and self.reconstructions < least:
                raise ConfigError(f"validate.{key}={file} measures validate.reconstructions. Set both, e.g. 32.")
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise ConfigError(f"validate.share={self.share} must lie between 0 and 1, e.g. 0.01; null for none.")
        if self.share is not None and self.urls is not None:
            raise ConfigError("validate.share and validate.urls exclude each other. Set one of them to null.")
        key = "every_epochs" if self.every_epochs is not None else "every_steps"
        due = getattr(self, key)
        if due is not None and self.share is None and self.urls is None:
            raise ConfigError(
                f"validate.{key}={due} needs held-out samples. Set validate.share, e.g. 0.01, or validate.urls."
            )
        if due is not None and not self.logsnr:
            raise ConfigError("validate.logsnr=[] names no noise level, e.g. validate.logsnr=[-4,0,4].")


@dataclass(kw_only=True)
class ProfileConfig:
    """The profiler's window."""

    start_step: int
    """First optimizer step that is profiled; the first step of all sets things up and would hide the rest."""
    steps: int | None
    """Optimizer steps that are profiled; null = off."""

    def __post_init__(self) -> None:
        limit(self, "profile", "start_step", least=2)
        limit(self, "profile", "steps", least=1)


@dataclass(kw_only=True)
class TrackerConfig:
    """Where metrics and samples are shown."""

    name: TrackerName
    """none, or the tracker of that name."""
    project: str | None
    """Project that the run belongs to; all but tensorboard and dvclive need one."""
    entity: str | None = None
    """Account or team that owns the project; null = the tracker's default."""
    mode: TrackerMode = TrackerMode.online
    """online, or offline to sync by hand later."""

    def __post_init__(self) -> None:
        without = (TrackerName.none, TrackerName.tensorboard, TrackerName.dvclive)
        if self.name not in without and not self.project:
            raise ConfigError(f"tracker={self.name} needs tracker.project, e.g. tracker.project=cascade.")


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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compile_fallback: bool = False
    """Run without compilation what needs more graphs than expected, instead of ending the run."""


COMPONENTS = ("model", "task", "objective", "data", "optimizer", "lr_scheduler")
"""Root keys that hold a component and are chosen by the group of the same name."""
