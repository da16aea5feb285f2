"""The frozen CLIP image tower and its preprocessing on the device.

Shape legend: B batch, C channels, H W image size, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.frozen_part import ClipTower

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(kw_only=True, eq=False)
class ImageEncoder(ClipTower):
    """CLIP's image tower with projection, frozen (Stable Cascade uses ViT-L/14).

    Args:
        image_size_px: side of the square that the tower sees, a multiple of `patch_size_px`.
        patch_size_px: side of its patches.
        antialias: whether a larger image is low-passed as it shrinks to the tower's size, as CLIP's own preprocessing
            does; false = as the original with its torchvision 0.16.
    """

    key = "image_encoder"

    projection_dim: int
    image_size_px: int
    patch_size_px: int
    antialias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size_px < 1 or self.image_size_px % self.patch_size_px:
            raise ValueError(
                f"image_encoder.patch_size_px={self.patch_size_px}: must divide "
                f"image_encoder.image_size_px={self.image_size_px}"
            )

    def build(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Make the frozen tower on `device`; a ConfigError for weights that do not exist or have other sizes."""
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        sizes = CLIPVisionConfig(image_size=self.image_size_px, patch_size=self.patch_size_px, **self.sizes)
        self._make(CLIPVisionModelWithProjection, sizes, device, dtype)
        config = self.module.config
        if (config.image_size, config.projection_dim) != (self.image_size_px, self.projection_dim):
            raise ConfigError(
                f"image_encoder.projection_dim={self.projection_dim} and image_size_px={self.image_size_px}: "
                f"{self.weights} has {config.projection_dim} and {config.image_size}"
            )
        self._mean = torch.tensor(CLIP_MEAN, device=device).view(3, 1, 1)
        self._std = torch.tensor(CLIP_STD, device=device).view(3, 1, 1)

    def preprocess(self, image_BCHW: Tensor) -> Tensor:
        """Resize the shorter side (bicubic), cut the centre square and normalise; [0, 1] in, fp32 out."""
        height, width = image_BCHW.shape[-2:]
        side, short = self.image_size_px, min(height, width)
        size = (side * height // short, side * width // short)
        resized = torch.nn.functional.interpolate(image_BCHW.float(), size, mode="bicubic", antialias=self.antialias)
        top, left = round((size[0] - side) / 2), round((size[1] - side) / 2)
        return (resized[..., top : top + side, left : left + side] - self._mean) / self._std

    @torch.no_grad()
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to embeddings (B, 1, D) in the tower's dtype. Must not sync."""
        pixels = self.preprocess(image_BCHW).to(self.module.dtype)
        return self.module(pixel_values=pixels).image_embeds.unsqueeze(1)
