"""The patch discriminator of an adversarial loss (Isola et al. 2017, section 3.2), with group norm.

Group norm acts on one sample at a time, so that neither ranks nor micro-batches change a score.

Shape legend: B batch, H W image size, h w scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cascade_train.models.initialize import Fill, initialise, kernel_rule


class PatchDiscriminator(nn.Module):
    """Scores patches of an image: high where it looks like training data."""

    def __init__(self, *, channels: int, layers: int) -> None:
        """Make `layers` that halve the size and double the width, from `channels` to 8 times that at most."""
        super().__init__()
        blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2))]
        width = channels
        for layer in range(1, layers + 1):
            wider = channels * min(2**layer, 8)
            size, stride = (4, 2) if layer < layers else (3, 1)
            convolution = nn.Conv2d(width, wider, size, stride=stride, padding=1, bias=False)
            blocks.append(nn.Sequential(convolution, nn.GroupNorm(math.gcd(32, wider), wider), nn.LeakyReLU(0.2)))
            width = wider
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return scores (B, h, w) fp32 of images (B, 3, H, W) in [0, 1], each for a patch."""
        x = (image_BCHW * 2 - 1).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().sum(dim=1)  # of its one channel: FSDP warns of views

    def units(self) -> list[list[nn.Module]]:
        """Return the layers, in execution order, one each."""
        return [[block] for block in self.blocks]


def build_discriminator(*, channels: int, layers: int, seed: int, device: torch.device) -> PatchDiscriminator:
    """Return a discriminator with values from a seed, fp32: kernels N(0, 0.02^2), as in the paper."""
    with torch.device("meta"):
        discriminator = PatchDiscriminator(channels=channels, layers=layers)
    rule = kernel_rule(lambda _: Fill(kind="normal", scale=0.02))
    initialise(discriminator, rule, device=device, dtype=torch.float32, seed=seed)
    return discriminator.train()
