"""A small network that finds what is salient in a picture, in the layout of the original's `saliency_model.pt`."""

from __future__ import annotations

from torch import Tensor, nn


def normalised(pad: int, channels: int, out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a mirrored border, a convolution and an instance norm: the first three places of each group."""
    return [
        nn.ReflectionPad2d(pad),
        nn.Conv2d(channels, out, kernel, stride),
        nn.InstanceNorm2d(out, affine=True),
    ]


class SaliencyBlock(nn.Module):
    """Two normalised convolutions, added to what went in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (normalised(1, channels, channels, 3) for _ in range(2))
        self.resblock = nn.Sequential(*first, nn.ReLU(), *second)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, h, w) to the same shape."""
        return features + self.resblock(features)


class SaliencyNetwork(nn.Module):
    """Maps pictures (B, 3, H, W) in [0, 1] to saliency (B, 1, h, w) in [0, 1], at about an eighth of their sides.

    Stable Cascade, modules/cnet_modules/inpainting; names and shapes are those of its weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.downsampler = nn.Sequential(
            *normalised(4, 3, 8, 9, 4),
            nn.ReLU(),
            *normalised(1, 8, 16, 3, 2),
            nn.ReLU(),
            *normalised(1, 16, 32, 3, 2),
            nn.ReLU(),
        )
        self.residual = nn.Sequential(SaliencyBlock(32), nn.Conv2d(32, 64, 1, bias=False, groups=32), SaliencyBlock(64))
        self.segmentator = nn.Sequential(
            *normalised(1, 64, 16, 3),
            nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.ReflectionPad2d(4),
            nn.Conv2d(16, 1, 9),
            nn.Sigmoid(),
        )

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pictures to saliency; sides of at least 80 pixels."""
        return self.segmentator(self.residual(self.downsampler(image_BCHW)))
