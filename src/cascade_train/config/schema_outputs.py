"""The typed nodes of what a run saves and shows: checkpoints, log, samples, validation, profile, tracker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cascade_train.errors import ConfigError
from cascade_train.options import limit

BestMode = StrEnum("BestMode", ["min", "max"])
SamplerName = StrEnum("SamplerName", ["ddpm", "ddim", "lcm"])
TrackerName = StrEnum(
    "TrackerName",
    ["none", "aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"],
)
TrackerMode = StrEnum("TrackerMode", ["online", "offline"])


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
    asynchronous: bool = True
    """Train on once the state is copied to the host, while a thread writes it; false = wait for the disk."""

    def __post_init__(self) -> None:
        limit(self, "checkpoint", "every_steps", "keep_last", "keep_every_steps", "keep_best", "every_epochs", least=1)
        if (self.keep_best is None) != (self.best_metric is None):
            raise ConfigError(
                f"checkpoint.keep_best={self.keep_best} and checkpoint.best_metric={self.best_metric} belong together."
                " Set both, e.g. checkpoint.keep_best=3 checkpoint.best_metric=validate/loss, or neither."
            )
        if self.keep_last is None and self.keep_best is not None:
            raise ConfigError(
                "checkpoint.keep_best has no effect with checkpoint.keep_last=null: all checkpoints stay as they are."
                " Set checkpoint.keep_last, e.g. checkpoint.keep_last=2."
            )


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
    """Loss on held-out samples as training has it, with random choices that stay; at step 0 too."""

    every_steps: int | None
    """Optimizer steps between validations; null = none."""
    share: float | None
    """Share of the samples that is held out, chosen by a hash of their keys, in (0, 1); null = none."""
    urls: list[str] | None
    """Held-out set of its own, in place of `share`."""
    samples: int
    """Held-out samples of one validation."""
    logsnr: list[float]
    """Noise levels (natural logarithm of the signal-to-noise ratio) at which the unweighted loss is measured too, at
    every fourth validation and the last; [] = at none."""
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
