"""The control network: from a control map to what is added in front of a denoising network's residual blocks.

Shape legend: B batch, C channels, H W size of the map, D width of a controlled block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.networks.efficientnet import build_control_features
from cascade_train.models.initialize import ZEROS, Fill, Rule, convolution_rule, initialise, torch_rule

LARGE_WIDTHS = (16384, 1024, 1280)
"""Widths inside the large bottleneck, and of its features."""

LARGE_BLOCKS = 8
SMALL_WIDTHS = (32, 64, 64, 128, 128)
"""Widths of the small bottleneck's convolutions, each of which halves the size."""

EFFNET_GAIN = 1.2
"""Random weights give features of std 0.003 (sparse edges) to 0.03 (noise); at 1.1 they fade, at 1.3 they burst."""

MIRRORED = (0, 4, 8, 12)
OF = 64
"""Of 64 residual blocks the original controls these, and those as far from the end."""


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """What makes a control network, apart from its values.

    Attributes:
        channels: of the control map.
        bottleneck: "effnet" and "small" take maps of the image's size, "simple" and "large" of the latent's.
        blocks: indices of the controlled residual blocks in order of execution, down then up, every repeat counted.
        widths: of each of these blocks.
    """

    channels: int
    bottleneck: str
    blocks: tuple[int, ...]
    widths: tuple[int, ...]


class ControlNetwork(nn.Module):
    """A backbone over the control map, and a projection of its features for each controlled block.

    The state dict has the names of Stable Cascade, modules/controlnet.py: `backbone.*`, and `projections.i.*` for
    `spec.blocks[i]`. Stays in eval mode: batch statistics are fixed and no layer is skipped, while all weights train.
    """

    def __init__(self, spec: ControlSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = BACKBONES[spec.bottleneck][0](spec.channels)
        features = [m.out_channels for m in self.backbone.modules() if isinstance(m, nn.Conv2d)][-1]
        self.projections = nn.ModuleList(_projection(features, width) for width in spec.widths)
        self.eval()

    def forward(self, control_BCHW: Tensor) -> dict[int, Tensor]:
        """Map maps (B, C, H, W), a ConfigError if they do not fit, to (B, D, h, w) by index of controlled block."""
        self._check(control_BCHW)
        features_BCHW = self.backbone(control_BCHW)
        pairs = zip(self.spec.blocks, self.projections, strict=True)
        return {block: projection(features_BCHW) for block, projection in pairs}

    def _check(self, control_BCHW: Tensor) -> None:
        spec, (_, channels, *size) = self.spec, control_BCHW.shape
        smallest = 1
        if spec.bottleneck == "effnet":  # below, its features are 1 x 1, and know nothing of places
            smallest = 33 if channels == 3 else 35
        if channels != spec.channels or min(size) < smallest:
            raise ConfigError(
                f"control map of {channels} channels and {size[0]} x {size[1]} pixels: this control network takes "
                f"{spec.channels} channels, and {smallest} x {smallest} pixels at least; use the filter that it was "
                "trained with, larger images or, for small maps, task.bottleneck=simple"
            )

    def units(self) -> list[list[nn.Module]]:
        """Return the modules that shard and compile together: the backbone, and each projection."""
        return [[self.backbone], *([projection] for projection in self.projections)]

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        del mode
        return super().train(False)


class ControlResBlock(nn.Module):
    """The residual block of the large bottleneck: norm, GELU and 3x3 convolution, twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [(_ChannelNorm(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
        self.blocks = nn.Sequential(*layers[0], *layers[1])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        return x_BCHW + self.blocks(x_BCHW)


class _ChannelNorm(nn.LayerNorm):
    """Layer norm with scale and shift over the channels of (B, C, H, W)."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return super().forward(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _projection(features: int, width: int) -> nn.Sequential:
    inner, outer = (nn.Conv2d(features, each, kernel_size=1, bias=False) for each in (features, width))
    return nn.Sequential(inner, nn.LeakyReLU(0.2), outer)


def _simple(channels: int) -> nn.Sequential:
    wide = 4 * channels
    first, last = nn.Conv2d(channels, wide, 3, padding=1), nn.Conv2d(wide, channels, 3, padding=1)
    return nn.Sequential(first, nn.LeakyReLU(0.2), last)


def _large(channels: int) -> nn.Sequential:
    wide, inner, features = LARGE_WIDTHS
    blocks = [ControlResBlock(inner) for _ in range(LARGE_BLOCKS)]
    first, second = nn.Conv2d(channels, wide, kernel_size=1), nn.Conv2d(wide, inner, kernel_size=1)
    return nn.Sequential(first, nn.LeakyReLU(0.2), second, *blocks, nn.Conv2d(inner, features, kernel_size=1))


def _small(channels: int) -> nn.Sequential:
    pairs = zip((channels, *SMALL_WIDTHS), SMALL_WIDTHS, strict=False)
    layers = [(nn.Conv2d(c, d, kernel_size=3, stride=2, padding=1), nn.LeakyReLU(0.2)) for c, d in pairs]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


BACKBONES: Mapping[str, tuple[Callable[[int], nn.Sequential], Rule | None]] = {
    "effnet": (build_control_features, convolution_rule(EFFNET_GAIN)),
    "simple": (_simple, None),
    "large": (_large, None),
    "small": (_small, convolution_rule(math.sqrt(2.0))),
}
"""What makes features of a map of C channels, by its last convolution, and its values; None = torch's own."""


def build_control_network(spec: ControlSpec, *, device: torch.device, seed: int) -> ControlNetwork:
    """Return a control network with its initial values, fp32: the last layer of each projection is zero."""
    with torch.device("meta"):
        network = ControlNetwork(spec)

    of_torch = torch_rule(network)
    of_backbone = BACKBONES[spec.bottleneck][1] or of_torch

    def rule(name: str, parameter: nn.Parameter) -> Fill:
        if name.startswith("backbone."):
            return of_backbone(name, parameter)
        return ZEROS if name.endswith(".2.weight") else of_torch(name, parameter)

    initialise(network, rule, device=device, dtype=torch.float32, seed=seed)
    return network


def mirrored_blocks(executed: int) -> tuple[int, ...]:
    """Return which of a network's executed residual blocks are controlled by default.

    Of the 64 of Stage C 3.6B the original's list, [0, 4, 8, 12, 51, 55, 59, 63]; of others those at the same depth.
    """
    down = {block * executed // OF for block in MIRRORED}
    return tuple(sorted(down | {executed - 1 - block for block in down}))


def block_widths(config: Mapping[str, Any]) -> list[int]:
    """Return the width of every residual block that a denoising network executes, in order, every repeat counted."""
    widths: Sequence[int] = config["block_out_channels"]
    down = (widths, config["down_num_layers_per_block"], config["down_blocks_repeat_mappers"])
    up = (widths[::-1], config["up_num_layers_per_block"], config["up_blocks_repeat_mappers"])
    return [
        width
        for levels in (down, up)
        for width, layers, repeats in zip(*levels, strict=True)
        for _ in range(layers * repeats)
    ]
