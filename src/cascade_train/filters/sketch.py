"""Edges as people draw them, in lines of random width: sketches, by PiDiNet.

Its convolutions weigh differences of pixels; each is computed as a plain convolution with another kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import (
    ControlFilter,
    ControlMap,
    Encode,
    between,
    check_kernels,
    check_threshold,
    dilate,
    resize_map,
)
from cascade_train.filters.parts.requirements import WeightsFile, find_file, load_weights
from cascade_train.options import File, check_least

EDGES = WeightsFile(
    key="task.filter.weights",
    what="the edge network of the sketch filter",
    usual_name="table5_pidinet.pth",
    licence="research alone, commercial use by consent of PiDiNet's authors",
    found="github.com/hellozhuo/pidinet and github.com/Stability-AI/StableCascade, modules/cnet_modules/pidinet/ckpts",
)

WIDTH = 60
"""Channels of the first stage; the others have twice and four times as many."""

SMALLEST_SIDE = 8
"""In pixels: the network halves a picture three times."""

ATTENTION_WIDTH = 24
DILATIONS = (5, 7, 9, 11)
NEXT_AROUND = (3, 0, 1, 6, 4, 2, 7, 8, 5)
"""Which pixel of a 3 x 3 square comes before each on the way around its middle; the middle itself stays."""

INNER = (6, 7, 8, 11, 13, 16, 17, 18)
OUTER = (0, 2, 4, 10, 14, 20, 22, 24)
"""Places of a 5 x 5 square: the ring around its middle, and the pixel behind each as seen from there."""


@dataclass(kw_only=True, eq=False)
class SketchFilter(ControlFilter):
    """One channel: edges by PiDiNet, thickened and made black and white at random.

    Stable Cascade, modules/controlnet.py, `PidiFilter`; there all pictures of a batch share their draws.
    """

    channels = 1

    weights: File[str]
    resize: int | None
    dilation_kernels: list[int]
    binarize: bool
    threshold: list[float]

    def __post_init__(self) -> None:
        check_least("task.filter.resize", self.resize, SMALLEST_SIDE, "the side in pixels of a copy; null = no copy")
        check_kernels("dilation_kernels", self.dilation_kernels)
        check_threshold(self.threshold)
        fixed = not self.binarize or self.threshold[0] == self.threshold[1]
        self.deterministic = fixed and len(set(self.dilation_kernels)) == 1

    def sample_transform(self) -> SampleTransform:
        """Draws line width and threshold."""
        find_file(self.weights, EDGES)
        return self._draw

    def _draw(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        place = int(between(0, len(self.dilation_kernels), generator))
        low, high = self.threshold
        return {
            "control_kernel": np.array(place, dtype=np.int64),
            "control_threshold": np.full((1, 1, 1), between(low, high, generator), dtype=np.float32),
        }

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Load the network."""
        network = EdgeNetwork().eval().requires_grad_(False)
        load_weights(network, self.weights, EDGES, device=device)

        @torch.no_grad()
        def sketched(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
            size = image_BCHW.shape[-2:]
            if self.resize is None and min(size) < SMALLEST_SIDE:
                raise ConfigError(
                    f"task.filter.resize=null: pictures of {tuple(size)} px are too small to find edges in, they need"
                    f" sides of {SMALLEST_SIDE} px; give task.filter.resize"
                )
            edges_B1HW = network(resize_map(image_BCHW, size if self.resize is None else (self.resize, self.resize)))
            thick = torch.stack([dilate(edges_B1HW, kernel) for kernel in self.dilation_kernels])
            chosen_B1HW = thick[maps["control_kernel"], torch.arange(len(image_BCHW), device=image_BCHW.device)]
            if self.binarize:
                chosen_B1HW = (chosen_B1HW > maps["control_threshold"]).float()
            return resize_map(chosen_B1HW, size)

        return sketched


def central(weight: Tensor) -> Tensor:
    """Kernel (O, I, 3, 3) that weighs each pixel's difference from the middle one (eq. 3)."""
    middle = torch.zeros_like(weight)
    middle[..., 1, 1] = weight.sum(dim=(2, 3))
    return weight - middle


def angular(weight: Tensor) -> Tensor:
    """Kernel (O, I, 3, 3) of each pixel's difference from the next one around (eq. 4)."""
    return weight - weight.flatten(2)[..., NEXT_AROUND].view_as(weight)


def radial(weight: Tensor) -> Tensor:
    """Kernel (O, I, 5, 5) that weighs differences of an outer and an inner ring (eq. 5)."""
    ring = weight.flatten(2)[..., 1:]
    kernel = weight.new_zeros(*weight.shape[:2], 25)
    kernel[..., OUTER], kernel[..., INNER] = ring, -ring
    return kernel.unflatten(2, (5, 5))


KERNELS: tuple[Callable[[Tensor], Tensor], ...] = (central, angular, radial, torch.clone)
"""Of a stage's convolutions, the last a plain one; the first stage begins with the second."""


class DifferenceConv(nn.Module):
    """A convolution of pixel differences, without bias; its kernel is made from the weight."""

    def __init__(self, channels: int, out: int, kernel: Callable[[Tensor], Tensor], groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels // groups, 3, 3))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.kernel, self.groups = kernel, groups

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, out, h, w)."""
        kernel = self.kernel(self.weight)
        return F.conv2d(features, kernel, padding=kernel.shape[-1] // 2, groups=self.groups)


class EdgeBlock(nn.Module):
    """A difference of pixels in each channel, and a mixture of channels, added to what went in."""

    def __init__(self, channels: int, out: int, kernel: Callable[[Tensor], Tensor], *, halves: bool) -> None:
        super().__init__()
        self.conv1 = DifferenceConv(channels, channels, kernel, groups=channels)
        self.conv2 = nn.Conv2d(channels, out, 1, bias=False)
        self.shortcut = nn.Conv2d(channels, out, 1) if halves else None

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, out, h, w), or to half its sides."""
        features = features if self.shortcut is None else F.max_pool2d(features, 2)
        kept = features if self.shortcut is None else self.shortcut(features)
        return kept + self.conv2(F.relu(self.conv1(features)))


class DilatedContext(nn.Module):
    """Sums what four dilated convolutions see."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, ATTENTION_WIDTH, 1)
        for place, dilation in enumerate(DILATIONS, start=1):
            conv = nn.Conv2d(ATTENTION_WIDTH, ATTENTION_WIDTH, 3, padding=dilation, dilation=dilation, bias=False)
            self.add_module(f"conv2_{place}", conv)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, 24, h, w)."""
        first, *dilated = self.children()
        mixed = first(F.relu(features))
        return torch.stack([conv(mixed) for conv in dilated]).sum(dim=0)


class SpatialAttention(nn.Module):
    """Weighs each place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ATTENTION_WIDTH, 4, 1)
        self.conv2 = nn.Conv2d(4, 1, 3, padding=1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, 24, h, w) to the same shape."""
        return features * torch.sigmoid(self.conv2(self.conv1(F.relu(features))))


class EdgeNetwork(nn.Module):
    """Maps pictures (B, 3, H, W) in [0, 1] to edges (B, 1, H, W) in [0, 1]; sides of at least 8 pixels.

    PiDiNet (Su et al. 2021, Pixel Difference Networks for Efficient Edge Detection) in the layout of its published
    `table5_pidinet.pth`: four stages of central, angular, radial and plain convolutions.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH)
        self.init_block = DifferenceConv(3, WIDTH, central)
        channels = WIDTH
        for stage, width in enumerate(widths, start=1):
            for place, kernel in enumerate(KERNELS[1:] if stage == 1 else KERNELS, start=1):
                block = EdgeBlock(channels, width, kernel, halves=stage > 1 and place == 1)
                self.add_module(f"block{stage}_{place}", block)
                channels = width
        self._stages = [[f"block{stage}_{place}" for place in range(1, 4 + (stage > 1))] for stage in range(1, 5)]
        self.dilations = nn.ModuleList(DilatedContext(width) for width in widths)
        self.attentions = nn.ModuleList(SpatialAttention() for _ in widths)
        self.conv_reduces = nn.ModuleList(
            nn.Sequential(OrderedDict(conv=nn.Conv2d(ATTENTION_WIDTH, 1, 1))) for _ in widths
        )
        self.classifier = nn.Conv2d(4, 1, 1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pictures to edges."""
        features, edges = self.init_block(image_BCHW), []
        for place, names in enumerate(self._stages):
            for name in names:
                features = self.get_submodule(name)(features)
            seen = self.attentions[place](self.dilations[place](features))
            edge = self.conv_reduces[place](seen)
            edges.append(F.interpolate(edge, image_BCHW.shape[-2:], mode="bilinear", align_corners=False))
        return torch.sigmoid(self.classifier(torch.cat(edges, dim=1)))
