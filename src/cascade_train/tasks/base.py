"""The contract of a task: which parameters train, what is added to the stage, and the per-sample loss.

A task sees no rank, no optimizer and no cadence; those belong to the one loop (engine/loop.py).

Shape legend: B batch, C channels, H W size.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cascade_train.batch import Batch, SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.models.stage import Save, Stage, to_device

Predictor = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps noised latents (B, C, H, W) and timestep ratios (B,) to conditional and unconditional predictions."""

Draws = Callable[[str], list[torch.Generator]]
"""Maps the name of a purpose to new CPU generators, one for each picture."""

ImageMaker = Callable[[Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Maps images (B, 3, H, W) float in [0, 1] and the workers' tensors of them to tensors (B, ...) by name."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a phase's loss returns for one micro-batch.

    Attributes:
        loss_B: (B,) fp32, weighted, differentiated.
        report: named (B,) or (B, n) fp32 tensors without gradient, for `after_step`; the means of the (B,) are logged.
            `loss_raw`, the unweighted loss, is always one of them.
        totals: named tensors of any shape without gradient, for `after_step`, summed over the global batch.
    """

    loss_B: Tensor
    report: Mapping[str, Tensor]
    totals: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One optimizer's share of a step.

    Attributes:
        name: prefix of its metrics; the first phase's metrics have none.
        modules: the roots that are sharded, by name; their trainable parameters belong to the phase.
        units: per root, the groups of its modules that shard together (see `Stage.units`).
        gathered_whole: roots whose units are gathered together, by name: ranks may call these differently often in a
            micro-batch, and each gathering is collective.
        loss: maps a prepared micro-batch to its output; must not sync with the host. Validation calls it without
            gradients, and it keeps nothing then.
        optimizer: a component that replaces the run's optimizer; None = the run's.
        start_step: first optimizer step in which the phase runs.
        averaged: whether its weights are averaged where the run has an average.
        rewritten: whether `Task.after_step` writes its weights.
        lrs: learning rates of roots that have their own, by name, as `optimizer.lr` is one.
        until: optimizer steps after which roots stay as they are, by name; below 1 = a share of the run's.
    """

    name: str
    modules: Mapping[str, nn.Module]
    units: Mapping[str, list[list[nn.Module]]]
    loss: Callable[[Any], StepOutput]
    gathered_whole: frozenset[str] = frozenset()
    optimizer: Any = field(default=None)
    start_step: int = 1
    averaged: bool = True
    rewritten: bool = False
    lrs: Mapping[str, float] = field(default_factory=dict)
    until: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Export:
    """One result of a run, in the form that other programs load.

    The weights of `module` (`whole`: the frozen ones too) are gathered from their shards, averaged where the run has an
    average; `write` writes the state dict, on rank 0 alone.
    """

    module: nn.Module
    write: Save
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A user's images for samples, beside their prompts; pictures are uint8 on the host.

    Attributes:
        image_BCHW: (B, 3, H, W) pictures, or (B, C, h, w) finished control maps, 255 for 1.
        is_map: whether they are maps.
        strength: factor of the control; 1 as in training, 0 = none.
        numbers: of the B samples, which seed the random choices about their maps.
        start_BCHW: (B, 3, H, W) pictures that sampling starts from (image-to-image).
        start_strength: time, in (0, 1], to which those are noised; 1 keeps hardly anything of them.
        variation_BCHW: (B, 3, h, w) pictures whose embedding is a condition beside the prompt.
        semantic_BCHW: (B, C, h, w) fp32 semantic latents, for a stage that decodes them.
    """

    image_BCHW: Tensor | None = None
    is_map: bool = False
    strength: float = 1.0
    numbers: tuple[int, ...] = ()
    start_BCHW: Tensor | None = None
    start_strength: float = 1.0
    variation_BCHW: Tensor | None = None
    semantic_BCHW: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Options of the sampler; see `SampleConfig`."""

    sampler: str
    steps: int
    guidance_scale: float | None
    shift: float
    negative_prompt: str = ""


class ImageSampler(abc.ABC):
    """Makes sample pictures; `result` is the title of what `sample` returns."""

    result: str

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Pictures to show beside the result for B captioned images, (B, 3, h, w) in [0, 1], by title."""
        return {}

    @abc.abstractmethod
    def sample(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Pictures (B, 3, H, W) fp32 in [0, 1] on the device, for B prompts.

        `image_BCHW` (B, 3, H, W) float in [0, 1] are the captions' own images, replaced by a user's in `guide`. A
        ConfigError if pictures are missing, or the task has no use for them.
        """


class Task(abc.ABC):
    """What trains, and how a batch becomes a loss. The constructor is cheap; ValueError: an option out of range.

    Attributes:
        fits: `Stage.abilities`, or names of stages, of which a stage must have one for the task to train it.
        trains_network: whether the stage's own network gets gradients (fp32 masters) or stays frozen.
        needs_image: whether samples follow an image even under prompts of the user's own.
        denoises: whether it trains a network to denoise latents; else it cannot train from a cache or sample prompts.
        reconstructs: those of `fits` that it trains by objectives of pictures alone. Where there is one, such an
            objective may replace this task, for each of `fits`.
        stage: from `attach` on.
        device: from `attach` on.
    """

    fits: ClassVar[tuple[str, ...]]
    trains_network: ClassVar[bool]
    needs_image: ClassVar[bool] = False
    denoises: ClassVar[bool] = True
    reconstructs: ClassVar[tuple[str, ...]] = ()
    stage: Stage
    device: torch.device

    def for_objective(self, objective: Any) -> Task:
        """Task that trains by an objective, by default itself; a ConfigError for options without use."""
        return self

    def check_stage(self, stage: Stage) -> None:
        """Refuse options without use for a stage (ConfigError), which is constructed and not built yet."""

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage; a task extends this by what it freezes and adds. Called once, before sharding."""
        if not {stage.name, *stage.abilities} & {*self.fits}:
            raise AssertionError(f"a {type(self).__name__} is for {' or '.join(self.fits)}, not for {stage.name}")
        self.stage, self.device = stage, device

    @abc.abstractmethod
    def phases(self) -> list[Phase]:
        """Phases in the order in which they run within a step."""

    def sample_transform(self) -> SampleTransform | None:
        """Data workers' transform of each picture; None, the default = nothing. Called before the build."""
        return None

    def image_maker(self, stage: Stage, device: torch.device) -> ImageMaker | None:
        """Maker of the task's tensors in a cache from images on `device`; None, the default = it has none.

        The stage has its encoders. A ConfigError where they are drawn anew each epoch, which a cache cannot hold.
        """
        return None

    def trained_parts(self) -> frozenset[str]:
        """Encoders in which something trains, by their key below `model.`. Called after `check_stage`."""
        return frozenset()

    def unbuilt_parts(self) -> frozenset[str]:
        """Parts of the stage that the task does not need, perhaps "network"."""
        return frozenset()

    @abc.abstractmethod
    def prepare_batch(self, batch: Batch) -> Any:
        """Draw the batch's random choices, tokenize and move to the device. May sync with the host."""

    @abc.abstractmethod
    def measures(self, prepared: Any, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """Measures of a prepared micro-batch of held-out samples beside its loss, (B,) fp32 each, by name.

        A function of samples and weights alone, without gradient. Must not sync. `logsnr` are noise levels, for tasks
        that denoise.
        """

    @abc.abstractmethod
    def image_sampler(self, settings: SampleSettings, size: Sequence[int]) -> ImageSampler:
        """ImageSampler of pictures of (height, width) pixels, with everything the task added."""

    @abc.abstractmethod
    def exports(self) -> Mapping[str, Export]:
        """Results that a run writes to `export/<name>`, by name."""

    def load_export(self, export: Path) -> None:
        """Load a run's `export/` onto the attached stage; a ConfigError if it does not fit.

        Nothing by default: a network that trains is loaded by the stage, as its weights.
        """

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield name, with the root's in front, and whole fp32 value on the host of the tensors of `ema.weights`.

        Called after sharding. A ConfigError where the average cannot have weights of its own.
        """
        raise ConfigError(
            f"ema.weights={source}: the average of a {type(self).__name__} starts from the weights that train; leave"
            " ema.weights=null"
        )

    def after_step(self, report: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Update the task's own state after an optimizer step, and return metrics of it, () each.

        Collective, with equal values on all ranks: each phase's `StepOutput.report` over the global batch, in its
        order, (G,) or (G, n) fp32, and its `totals`.
        """
        return {}

    def summary(self) -> str:
        """Describe what the task added, for the start of the log; empty by default."""
        return ""

    def notices(self, *, last: bool = False) -> list[str]:
        """Messages about the samples, each once, and totals at the `last` call; empty by default."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """Task's own state, equal on all ranks; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy to the device without making the host wait."""
        return to_device(tensor, self.device)


def weighted(loss_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Losses (B,) times the weights of their samples; None = 1 each."""
    return loss_B if weight_B is None else loss_B * weight_B
