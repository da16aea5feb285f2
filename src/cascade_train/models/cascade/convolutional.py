"""A small semantic compressor and previewer of convolutions alone, cheap enough to train from nothing on a CPU.

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cascade_train.models.cascade.previewer import Previewer
from cascade_train.models.cascade.semantic_compressor import SemanticCompressor

STRIDE = 32
_PATCH = 4
_EPSILON = 1e-6
GELU_GAIN = 1.5
"""Keeps the scale of activations through a GELU."""


class CompressorNetwork(nn.Module):
    """A convolution of patches, three halvings of the resolution, and a map to channels of unit mean square.

    The channels of each position are divided by their root mean square, so that latents have the scale that diffusion
    expects without statistics of a batch or a data set.
    """

    def __init__(self, widths: tuple[int, int, int, int] = (32, 64, 128, 192), latent_channels: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], kernel_size=_PATCH, stride=_PATCH), nn.GELU()]
        for wide, wider in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(wide, wider, kernel_size=4, stride=2, padding=1), nn.GELU()]
        layers += [nn.Conv2d(widths[-1], widths[-1], kernel_size=3, padding=1), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], latent_channels, kernel_size=1))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map images (B, 3, H, W) in [0, 1] to latents (B, C, H / 32, W / 32)."""
        latent = self.layers(2 * image_BCHW - 1)
        return latent * torch.rsqrt(latent.square().mean(dim=1, keepdim=True) + _EPSILON)


class ConvolutionalCompressor(SemanticCompressor):
    """A semantic compressor of 0.9 million parameters for small images, to be trained with Stage B."""

    latent_channels = 16
    stride = STRIDE

    def _make(self) -> tuple[nn.Module, float]:
        return CompressorNetwork(latent_channels=self.latent_channels), GELU_GAIN

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1], sides multiples of 32, to (B, 16, H / 32, W / 32) fp32."""
        height, width = image_BCHW.shape[-2:]
        if height % STRIDE or width % STRIDE:
            raise ValueError(f"image of {height} x {width} pixels: both sides must be multiples of {STRIDE}")
        return self.module(image_BCHW.float())


class DoublingNetwork(nn.Module):
    """A convolution, three doublings of the resolution, and a convolution to patches of 4 x 4 pixels."""

    def __init__(self, latent_channels: int = 16, widths: tuple[int, int, int, int] = (128, 128, 64, 32)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(latent_channels, widths[0], kernel_size=3, padding=1), nn.GELU()]
        for wide, narrow in zip(widths, widths[1:], strict=False):
            layers += [nn.ConvTranspose2d(wide, narrow, kernel_size=4, stride=2, padding=1), nn.GELU()]
        layers += [nn.Conv2d(widths[-1], 3 * _PATCH**2, kernel_size=3, padding=1), nn.PixelShuffle(_PATCH)]
        self.layers = nn.Sequential(*layers)

    def forward(self, latent_BCHW: Tensor) -> Tensor:
        """Map latents (B, C, H, W) to images (B, 3, 32 H, 32 W), about [0, 1]."""
        return self.layers(latent_BCHW) + 0.5


class ConvolutionalPreviewer(Previewer):
    """A previewer of 0.5 million parameters that shows images at full size."""

    scale = STRIDE

    def _make(self) -> tuple[nn.Module, float]:
        return DoublingNetwork(), GELU_GAIN
