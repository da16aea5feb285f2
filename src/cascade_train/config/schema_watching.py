"""The typed nodes of what looks at a run and changes nothing in it: lines, grids, validation, profiles, trackers.

What trains lives in schema.py. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cascade_train.config.limits import above, at_least
from cascade_train.errors import ConfigError


class SamplerName(StrEnum):
    """Reverse process of the sample grids."""

    ddpm = "ddpm"
    ddim = "ddim"
    lcm = "lcm"


class TrackerName(StrEnum):
    """Where metrics and samples are shown, beside `metrics.jsonl`."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


class TrackerMode(StrEnum):
    """Whether the tracker talks to its server."""

    online = "online"
    offline = "offline"


@dataclass(kw_only=True)
class LogConfig:
    """The progress line and the flush of `metrics.jsonl`."""

    every_steps: int | None
    """Optimizer steps between lines; null = none, and metrics are written at checkpoints and at the end."""

    def __post_init__(self) -> None:
        at_least("log.every_steps", self.every_steps, 1)


@dataclass(kw_only=True)
class SampleConfig:
    """The grid of sampled images."""

    every_steps: int | None
    """Optimizer steps between grids; null = none."""
    prompts: list[str] | None
    """What to draw; null = captions of held-out samples, or of the first."""
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
    shift: float
    """logSNR shift of the sampling schedule, -2 ln(shift); 1 = none."""

    def __post_init__(self) -> None:
        at_least("sample.every_steps", self.every_steps, 1)
        at_least("sample.count", self.count, 1)
        at_least("sample.seed", self.seed, 0)
        at_least("sample.steps", self.steps, 1)
        at_least("sample.guidance_scale", self.guidance_scale, 0.0)
        above("sample.shift", self.shift, 0.0)
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

    def __post_init__(self) -> None:
        at_least("validate.every_steps", self.every_steps, 1)
        at_least("validate.samples", self.samples, 1)
        at_least("validate.reconstructions", self.reconstructions, 0)
        for key, least in (("lpips", 1), ("rfid", 2)):
            if (file := getattr(self, key)) is not None and self.reconstructions < least:
                raise ConfigError(f"validate.{key}={file} measures validate.reconstructions. Set both, e.g. 32.")
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise ConfigError(
                f"validate.share={self.share} must lie between 0 and 1, e.g. 0.01; null holds nothing out."
            )
        if self.share is not None and self.urls is not None:
            raise ConfigError("validate.share and validate.urls exclude each other. Set one of them to null.")
        if self.every_steps is not None and self.share is None and self.urls is None:
            raise ConfigError(
                f"validate.every_steps={self.every_steps} needs held-out samples. "
                "Set validate.share, e.g. 0.01, or validate.urls."
            )
        if self.every_steps is not None and not self.logsnr:
            raise ConfigError("validate.logsnr=[] names no noise level, e.g. validate.logsnr=[-4,0,4].")


@dataclass(kw_only=True)
class ProfileConfig:
    """The profiler's window."""

    start_step: int
    """First optimizer step that is profiled; the first step of all sets things up and would hide the rest."""
    steps: int | None
    """Optimizer steps that are profiled; null = off."""

    def __post_init__(self) -> None:
        at_least("profile.start_step", self.start_step, 2)
        at_least("profile.steps", self.steps, 1)


@dataclass(kw_only=True)
class TrackerConfig:
    """Where metrics and samples are shown."""

    name: TrackerName
    """none, tensorboard or wandb."""
    project: str | None
    """Project that the run belongs to; wandb needs one."""
    entity: str | None
    """Account or team that owns the project; null = the tracker's default."""
    mode: TrackerMode
    """online, or offline to sync by hand later."""

    def __post_init__(self) -> None:
        if self.name is TrackerName.wandb and not self.project:
            raise ConfigError("tracker=wandb needs tracker.project, e.g. tracker.project=cascade.")
