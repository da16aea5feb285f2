"""The previewer: semantic latents to small images for people.

Shape legend: B batch, C channels, H W latent size.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from cascade_train.models.cascade.networks.efficientnet import FixedBatchNorm2d
from cascade_train.models.frozen_part import FrozenPart


class Previewer(FrozenPart):
    """A frozen map from semantic latents to images.

    Attributes:
        scale: pixels of the preview for each latent position.
    """

    key = folder = "previewer"
    scale: ClassVar[int]

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W) to (B, 3, scale H, scale W) fp32, not clamped. Must not sync.

        With gradient where the module trains and the caller asks for it (`objective=preview`).
        """
        return self.module(latent_BCHW.float()).float()


class PreviewNetwork(nn.Module):
    """Convolutions, GELU and batch norm with three doublings of the resolution (key names of the original).

    From Stable Cascade, modules/previewer.py.
    """

    def __init__(self, in_channels: int = 16, hidden_channels: int = 512, out_channels: int = 3) -> None:
        super().__init__()
        half, quarter = hidden_channels // 2, hidden_channels // 4
        layers = [
            nn.Conv2d(in_channels, hidden_channels, kernel_size=1),
            nn.Conv2d(hidden_channels, hidden_channels, kernel_size=3, padding=1),
            nn.ConvTranspose2d(hidden_channels, half, kernel_size=2, stride=2),
            nn.Conv2d(half, half, kernel_size=3, padding=1),
            nn.ConvTranspose2d(half, quarter, kernel_size=2, stride=2),
            nn.Conv2d(quarter, quarter, kernel_size=3, padding=1),
            nn.ConvTranspose2d(quarter, quarter, kernel_size=2, stride=2),
            nn.Conv2d(quarter, quarter, kernel_size=3, padding=1),
        ]
        blocks: list[nn.Module] = []
        for layer in layers:
            blocks += [layer, nn.GELU(), FixedBatchNorm2d(layer.out_channels)]
        self.blocks = nn.Sequential(*blocks, nn.Conv2d(quarter, out_channels, kernel_size=1))

    def forward(self, latent_BCHW: Tensor) -> Tensor:
        """Map latents (B, C, H, W) to images (B, 3, 8 H, 8 W), not clamped."""
        return self.blocks(latent_BCHW)


class ConvolutionPreviewer(Previewer):
    """The original's previewer: eight pixels for each latent position."""

    scale = 8

    def _make(self) -> tuple[nn.Module, float]:
        return PreviewNetwork(), 1.6
