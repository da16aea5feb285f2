"""A micro-batch of a diffusion task as it is prepared for the loss.

Shape legend: B batch, C channels, H W image or latent size, L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from cascade_train.models.stage import Images, Products, Tokens


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A micro-batch with every random choice made, on the device.

    Attributes:
        image_BCHW: (B, 3, H, W) uint8 in [0, 255]; None where there is `cached` instead.
        tokens: of the whole captions, (B, L) each.
        drop_caption_B: (B,) bool, whose caption becomes the empty one in training.
        keep_image_B: (B,) bool on the host, whose image is a condition in training.
        timestep_B: (B,) fp32 uniform in [0, 1), determines the noise level.
        noise_BCHW: (B, C, H, W) fp32 standard normal, in the latent's shape.
        offset_BC11: (B, C, 1, 1) fp32 standard normal; None = no offset noise.
        weight_B: (B,) fp32 weight of each sample's loss; None = 1 each.
        drawn: of `Stage.draw`.
        cached: products of the images, from a cache.
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], weight of each place of the latents; None = 1 everywhere.
        perturbation_BCHW: (B, C, H, W) fp32 standard normal; None = the objective does not perturb its input.
        other_tokens: of the captions with other words, as a task may need them; None = none.
    """

    image_BCHW: Tensor | None
    tokens: Tokens
    drop_caption_B: Tensor
    keep_image_B: Tensor
    timestep_B: Tensor
    noise_BCHW: Tensor
    offset_BC11: Tensor | None = None
    weight_B: Tensor | None = None
    drawn: Any = None
    cached: Products = field(default_factory=dict)
    mask_B1HW: Tensor | None = None
    perturbation_BCHW: Tensor | None = None
    other_tokens: Tokens | None = None

    @property
    def images(self) -> Images:
        """(B, 3, H, W) float in [0, 1], or their cached products."""
        return self.cached if self.image_BCHW is None else self.image_BCHW.float() / 255


def repeated_twice(images: Images) -> Images:
    """Images, or their products, and the same once more behind them."""
    if isinstance(images, Tensor):
        return images.repeat(2, 1, 1, 1)
    return {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in images.items()}


def latent_mask(mask_B1HW: Tensor, shape: Sequence[int]) -> Tensor:
    """Mean of a uint8 mask over each place of latents (C, H, W), (B, 1, H, W) fp32 in [0, 1]; fp32 as is."""
    if mask_B1HW.dtype != torch.uint8:
        return mask_B1HW
    return adaptive_avg_pool2d(mask_B1HW.float() / 255, (shape[1], shape[2]))
