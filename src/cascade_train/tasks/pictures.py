"""What the tasks share that are scored by pictures: the pictures of a batch, their distance, and what people see.

Lives here: that alone. Must not live here: what trains (autoencoding.py, previewing.py), further terms of a loss
(vqgan.py).

Shape legend: B batch, H W image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.diffusion.objective import masked_mean
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Draws, Guide, Painter

PIXELS = ("l1", "l2")
"""Distances of pixels: absolute and squared."""


def pixel_distance(
    image_BCHW: Tensor, original_BCHW: Tensor, pixel: Literal["l1", "l2"], mask_B1HW: Tensor | None = None
) -> Tensor:
    """Return the mean distance of pixels, (B,) fp32.

    Args:
        image_BCHW: (B, 3, H, W) fp32.
        original_BCHW: likewise.
        pixel: which distance.
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], how much each place counts; None = all of them fully.
    """
    error_BCHW = image_BCHW - original_BCHW
    error_BCHW = error_BCHW.abs() if pixel == "l1" else error_BCHW.square()
    return error_BCHW.mean(dim=(1, 2, 3)) if mask_B1HW is None else masked_mean(error_BCHW, mask_B1HW)


def pictures_of(batch: Batch, device: torch.device) -> Tensor:
    """Return a batch's pictures (B, 3, H, W) fp32 in [0, 1] on the device."""
    if batch.image_BCHW is None:
        raise AssertionError("a cache is no data for a task that is scored by pictures, and was to be refused")
    return batch.image_BCHW.to(device, non_blocking=True).float() / 255


def mask_of(batch: Batch, device: torch.device) -> Tensor | None:
    """Return how much each place of a batch's pictures counts, (B, 1, H, W) fp32 in [0, 1]; None = all fully."""
    mask_B1HW = batch.tensors.get("mask")
    return None if mask_B1HW is None else mask_B1HW.to(device, non_blocking=True).float() / 255


def where_it_counts(made_BCHW: Tensor, image_BCHW: Tensor, mask_B1HW: Tensor | None) -> Tensor:
    """Return what was made, (B, 3, H, W), with the picture itself where a mask leaves places out."""
    return made_BCHW if mask_B1HW is None else image_BCHW + mask_B1HW * (made_BCHW - image_BCHW)


def weighted(loss_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return losses (B,) times the weights of their samples; None = 1 each."""
    return loss_B if weight_B is None else loss_B * weight_B


class RoundTrip(Painter):
    """Shows what a stage's latents keep of pictures: encodes and decodes them."""

    def __init__(self, stage: Stage) -> None:
        """Store the stage."""
        self.stage = stage

    def paint(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Return (B, 3, H', W') fp32 in [0, 1] of the captions' own images (B, 3, H, W)."""
        if image_BCHW is None:
            raise AssertionError("nobody asks for pictures of prompts alone: that is refused before")
        return self.stage.decode(self.stage.encode(image_BCHW))
