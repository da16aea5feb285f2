"""Inpainting and outpainting: pictures with a hole that a ControlNet fills."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, between, check_threshold
from cascade_train.filters.parts.requirements import WeightsFile, find_file, load_weights, opencv, require
from cascade_train.options import File, Share, check_fields

SALIENCY = WeightsFile(
    key="task.filter.weights",
    what="the saliency network of the inpainting filter",
    usual_name="saliency_model.pt",
    licence="MIT, with Stable Cascade's code",
    found="github.com/Stability-AI/StableCascade, modules/cnet_modules/inpainting",
)
SALIENCY_SIDE = 240
"""Shorter side in pixels of the copy in which salient things are looked for."""

LONGEST = 8
"""Largest ratio of the copy's sides: a strip of pixels would otherwise exhaust memory."""

BLUR_KERNEL = 141
"""Width in pixels of the Gaussian that rounds the mask of salient things."""

P_BOX = 0.5
"""Share of holes that are a box."""

BOX_SIDE = (0.2, 0.7)
STROKES = (1, 4)
BENDS = (4, 12)
STROKE_LENGTH = (0.05, 0.3)
STROKE_WIDTH = (0.03, 0.15)
"""Sides, lengths and widths are shares of the picture's; counts are drawn between the two, the second left out."""


@dataclass(kw_only=True, eq=False)
class InpaintFilter(ControlFilter):
    """Four channels: the picture with 1 in the hole, and the hole itself, 1 inside.

    Without weights the hole is a random box, or strokes of a brush, drawn by OpenCV. With weights it is what a network
    finds salient, as in Stable Cascade, modules/controlnet.py, `InpaintFilter`; there all pictures of a batch share
    their draws.
    """

    channels = 4

    weights: File[str | None]
    threshold: list[float]
    p_outpaint: Share[float]

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_fields(self, "task.filter.")
        if self.weights is None:
            require("cv2")
        fixed = self.threshold[0] == self.threshold[1] and self.p_outpaint in (0.0, 1.0)
        self.deterministic = self.weights is not None and fixed

    def sample_transform(self) -> SampleTransform:
        """Draws the hole, or the sample's threshold where a network finds it."""
        if self.weights is None:
            return self._draw_mask
        find_file(self.weights, SALIENCY)
        return self._draw_threshold

    def _draw_mask(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        _, height, width = image.shape
        mask = random_mask(height, width, generator)
        return {"control_mask": mask ^ np.uint8(between(0, 1, generator) < self.p_outpaint)}

    def _draw_threshold(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        low, high = self.threshold
        return {
            "control_threshold": np.full((1, 1, 1), between(low, high, generator), dtype=np.float32),
            "control_outpaint": np.full((1, 1, 1), between(0, 1, generator) < self.p_outpaint),
        }

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Load the network where there is one."""
        if self.weights is None:
            return mask_images
        network = SaliencyNetwork().eval().requires_grad_(False)
        load_weights(network, self.weights, SALIENCY, device=device)

        @torch.no_grad()
        def salient(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
            mask_B1HW = salient_mask(network, image_BCHW, maps["control_threshold"], maps["control_outpaint"])
            return mask_images(image_BCHW, {"control_mask": mask_B1HW})

        return salient


@torch.no_grad()
def mask_images(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """Pictures (B, 3, H, W) with 1 in the hole `control_mask`, (B, 1, H, W), and the hole: (B, 4, H, W)."""
    mask_B1HW = maps["control_mask"].bool()
    return torch.cat([image_BCHW.masked_fill(mask_B1HW, 1.0), mask_B1HW.to(image_BCHW.dtype)], dim=1)


def salient_mask(network: SaliencyNetwork, image_BCHW: Tensor, threshold_B111: Tensor, outpaint_B111: Tensor) -> Tensor:
    """Rounded mask (B, 1, H, W) bool of what is salient in pictures (B, 3, H, W), or of all else."""
    height, width = image_BCHW.shape[-2:]
    shorter = min(height, width)
    size = [min(SALIENCY_SIDE * side // shorter, SALIENCY_SIDE * LONGEST) for side in (height, width)]
    small_BCHW = F.interpolate(image_BCHW, size=size, mode="bilinear", antialias=True)
    mask_B1HW = (network(small_BCHW) > threshold_B111) ^ outpaint_B111
    mask_B1HW = F.interpolate(mask_B1HW.float(), size=(height, width), mode="nearest")
    return gaussian_blur(mask_B1HW, BLUR_KERNEL) > 0.5


def gaussian_blur(map_B1HW: Tensor, kernel: int) -> Tensor:
    """Blur maps (B, 1, H, W) by a Gaussian of this odd width in pixels, borders mirrored, cut where a side is short.

    Its sigma is 0.15 kernel + 0.35, as in torchvision and OpenCV.
    """
    for _ in ("rows", "columns"):
        reach = min(kernel // 2, map_B1HW.shape[-1] - 1)
        position = torch.arange(-reach, reach + 1, dtype=torch.float32, device=map_B1HW.device)
        weight = torch.exp(-0.5 * (position / (0.15 * kernel + 0.35)) ** 2)
        padded = F.pad(map_B1HW, (reach, reach, 0, 0), mode="reflect")
        map_B1HW = F.conv2d(padded, (weight / weight.sum()).view(1, 1, 1, -1)).transpose(2, 3)
    return map_B1HW


def random_mask(height: int, width: int, generator: torch.Generator) -> np.ndarray:
    """Draw a box or brush strokes (Yu et al. 2019), (1, height, width) uint8, 1 inside; at least one pixel."""
    if between(0, 1, generator) >= P_BOX:
        return _strokes(height, width, generator)
    mask = np.zeros((1, height, width), dtype=np.uint8)
    tall, wide = (max(1, round(side * between(*BOX_SIDE, generator))) for side in (height, width))
    top = int(between(0, height - tall + 1, generator))
    left = int(between(0, width - wide + 1, generator))
    mask[:, top : top + tall, left : left + wide] = 1
    return mask


def _strokes(height: int, width: int, generator: torch.Generator) -> np.ndarray:
    cv2 = opencv()
    mask = np.zeros((height, width), dtype=np.uint8)
    size = math.sqrt(height * width)
    for _ in range(int(between(*STROKES, generator))):
        points = _bent_line(height, width, size, generator)
        thickness = max(1, round(size * between(*STROKE_WIDTH, generator)))
        cv2.polylines(mask, [points], isClosed=False, color=1, thickness=thickness)
        for x, y in points.tolist():  # round ends and bends
            cv2.circle(mask, (x, y), thickness // 2, color=1, thickness=-1)
    return mask[None]


def _bent_line(height: int, width: int, size: float, generator: torch.Generator) -> np.ndarray:
    """Draw the points (N, 2) int32, x and y, of a zigzag line."""
    place = np.array([between(0, width, generator), between(0, height, generator)])
    angle = between(0, 2 * math.pi, generator)
    points = [place]
    for bend in range(int(between(*BENDS, generator))):
        turn = between(0.6, 1.4, generator)
        angle += math.pi - turn if bend % 2 else math.pi + turn
        length = size * between(*STROKE_LENGTH, generator)
        step = length * np.array([math.cos(angle), math.sin(angle)])
        place = np.clip(place + step, 0, [width - 1, height - 1])
        points.append(place)
    return np.stack(points).astype(np.int32)


def normalised(pad: int, channels: int, out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A mirrored border, a convolution and an instance norm."""
    return [nn.ReflectionPad2d(pad), nn.Conv2d(channels, out, kernel, stride), nn.InstanceNorm2d(out, affine=True)]


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
