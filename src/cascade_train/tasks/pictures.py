"""Base of the objectives and tasks that score pictures themselves, and denoise nothing.

Shape legend: B batch, H W image size.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.diffusion.objective import masked_mean
from cascade_train.models.image_quality import check_installed
from cascade_train.models.stage import Stage
from cascade_train.options import check_fields
from cascade_train.tasks.base import Draws, Guide, ImageSampler, SampleSettings, Task


@dataclass(kw_only=True, eq=False)
class PictureObjective(abc.ABC):
    """An objective that scores pictures by their pixels, among other things, and replaces `task=reconstruction`.

    A new kind is one file, with a subclass and its task, and one YAML.

    Args:
        pixel: distance between pixels, l1 (absolute) or l2 (squared).

    Attributes:
        denoises: whether it trains a network to denoise latents.
        fits: see `Task.fits`.
        options: options of `task=reconstruction` that it uses; others must be left out.
    """

    denoises: ClassVar[bool] = False
    fits: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()

    pixel: Literal["l1", "l2"]

    def __post_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def task(self, reconstruction: Any) -> Task:
        """Task that trains by this objective, of the options of `task=reconstruction`. Cheap."""

    def pixels(self, image_BCHW: Tensor, original_BCHW: Tensor, mask_B1HW: Tensor | None = None) -> Tensor:
        """Mean distance of pixels, (B,) fp32, of pictures (B, 3, H, W), weighted by a mask (B, 1, H, W)."""
        error_BCHW = image_BCHW - original_BCHW
        error_BCHW = error_BCHW.abs() if self.pixel == "l1" else error_BCHW.square()
        return error_BCHW.mean(dim=(1, 2, 3)) if mask_B1HW is None else masked_mean(error_BCHW, mask_B1HW)


@dataclass(kw_only=True)
class PreparedPictures:
    """A micro-batch on the device; a task adds its random choices.

    Attributes:
        image_BCHW: (B, 3, H, W) fp32 in [0, 1].
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], weight of each place; None = 1 everywhere.
        weight_B: (B,) fp32 weight of each sample's loss; None = 1 each.
        made_BCHW: (B, 3, H, W) reconstructions of the first phase, for a discriminator; None = not made yet.
    """

    image_BCHW: Tensor
    mask_B1HW: Tensor | None = None
    weight_B: Tensor | None = None
    made_BCHW: Tensor | None = None


class PictureTask(Task):
    """Base of the tasks that are scored by pictures; `result` is the title of its samples."""

    denoises = False
    needs_image = True
    trains_network = False
    result: ClassVar[str] = "reconstruction"

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage; a task extends this by what trains. A ConfigError without the library of measures."""
        check_installed()
        super().attach(stage, objective, device)

    def prepare_batch(self, batch: Batch) -> PreparedPictures:
        """Copy pictures, masks and weights to the device."""
        mask_B1HW = batch.tensors.get("mask")
        if batch.image_BCHW is None:
            raise AssertionError("a cache is no data for a task that is scored by pictures, and was to be refused")
        return PreparedPictures(
            image_BCHW=self._copy(batch.image_BCHW).float() / 255,
            mask_B1HW=None if mask_B1HW is None else self._copy(mask_B1HW).float() / 255,
            weight_B=None if batch.weight_B is None else self._copy(batch.weight_B),
        )

    def image_sampler(self, settings: SampleSettings, size: Sequence[int]) -> ImageSampler:
        """ImageSampler of a round trip through latents, without a sampler."""
        return RoundTrip(self.stage, self.result)


class RoundTrip(ImageSampler):
    """Encodes pictures to latents and decodes those."""

    def __init__(self, stage: Stage, result: str) -> None:
        self.stage, self.result = stage, result

    def sample(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """(B, 3, H', W') fp32 in [0, 1] of the captions' own images (B, 3, H, W)."""
        if image_BCHW is None:
            raise AssertionError("pictures of prompts alone are refused before")
        return self.stage.decode(self.stage.encode(image_BCHW))
