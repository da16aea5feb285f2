"""The semantic compressor: images to the 16-channel latents that Stage C models.

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor, nn

from cascade_train.models.cascade.networks.efficientnet import build_features
from cascade_train.models.frozen_part import FrozenPart

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

PUBLISHED_RESOLUTION_MULTIPLE = 42.67
"""Pixels of the finished image per latent position where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""


class SemanticCompressor(FrozenPart):
    """A frozen map from images to latents.

    Attributes:
        stride: image pixels for each latent position.
    """

    key = folder = "semantic_compressor"
    latent_channels: ClassVar[int]
    stride: ClassVar[int]

    @property
    def resolution_multiple(self) -> float:
        """Return the pixels of the finished image for each latent position: the compression."""
        return float(self.stride)

    @abc.abstractmethod
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to latents (B, C, ...) fp32. Must not sync.

        With gradient where the module trains and the caller asks for it (`task.train_compressor`).
        """


class EfficientNetEncoder(nn.Module):
    """EfficientNet-V2-S features, a 1x1 convolution and a batch norm without affine part (key names of the original).

    From Stable Cascade, modules/effnet.py. Makes no download.
    """

    def __init__(self, latent_channels: int = 16) -> None:
        super().__init__()
        self.backbone = build_features()
        self.mapper = nn.Sequential(
            nn.Conv2d(1280, latent_channels, kernel_size=1, bias=False),
            nn.BatchNorm2d(latent_channels, affine=False),
        )

    def forward(self, normalised_BCHW: Tensor) -> Tensor:
        """Map ImageNet-normalised images (B, 3, H, W) to latents (B, C, ceil(H / 32), ceil(W / 32))."""
        return self.mapper(self.backbone(normalised_BCHW))


class EfficientNetCompressor(SemanticCompressor):
    """The original's compressor: stride 32, no scaling of the latent."""

    latent_channels = 16
    stride = 32
    resolution_multiple = PUBLISHED_RESOLUTION_MULTIPLE

    def build(self, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Make the module, see `FrozenPart.build`, and the constants of its preprocessing."""
        super().build(device=device, dtype=dtype)
        self._mean = torch.tensor(IMAGENET_MEAN, device=device).view(3, 1, 1)
        self._std = torch.tensor(IMAGENET_STD, device=device).view(3, 1, 1)

    def _make(self) -> tuple[nn.Module, float]:
        # This gain keeps the scale of activations through the backbone's gates: latents of std 0.2 to 6.
        return EfficientNetEncoder(self.latent_channels), 1.13

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to (B, 16, ceil(H / 32), ceil(W / 32)) fp32."""
        return self.module((image_BCHW.float() - self._mean) / self._std)
