"""Pictures with a hole in them, that a ControlNet fills: inpainting, and outpainting where the rest is the hole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, between
from cascade_train.filters.parts.files import WeightsFile, find_file, load_weights
from cascade_train.filters.parts.libraries import require
from cascade_train.filters.parts.random_masks import random_mask
from cascade_train.filters.parts.saliency import SaliencyNetwork
from cascade_train.options import File

SALIENCY = WeightsFile(
    key="task.filter.weights",
    what="the saliency network of the inpainting filter",
    usual_name="saliency_model.pt",
    licence="MIT, with Stable Cascade's code",
    found="github.com/Stability-AI/StableCascade, modules/cnet_modules/inpainting",
)
SALIENCY_SIDE = 240
"""Shorter side in pixels of the copy in which salient things are searched."""

LONGEST = 8
"""The copy's longer side at most, in shorter sides: a strip of pixels would else need all memory."""

BLUR_KERNEL = 141
"""Width in pixels of the Gaussian that rounds the mask of salient things."""


class InpaintFilter(ControlFilter):
    """Four channels: the picture with 1 in the hole, and the hole itself, 1 inside.

    Without weights the hole is a random box, or strokes of a brush. With weights it is what a network finds salient,
    as in Stable Cascade, modules/controlnet.py, `InpaintFilter`; there all pictures of a batch share their draws.

    Args:
        weights: of the saliency network, a local file or `owner/name:file` on the hub; null = random holes.
        threshold: saliency above which a pixel belongs to the hole, drawn between these two; with weights alone.
        p_outpaint: share of samples whose hole is everything else, in [0, 1].

    Raises:
        ValueError: a number out of range.
        ConfigError: OpenCV, which draws random holes, is not installed.
    """

    channels = 4

    def __init__(self, *, weights: File[str | None], threshold: list[float], p_outpaint: float) -> None:
        if len(threshold) != 2 or not 0.0 <= threshold[0] <= threshold[1] <= 1.0:
            raise ValueError(f"threshold={threshold}: is drawn between two shares, give [low, high] with low <= high")
        if not 0.0 <= p_outpaint <= 1.0:
            raise ValueError(f"p_outpaint={p_outpaint}: is a share of the samples, give a number between 0 and 1")
        if weights is None:
            require("cv2")
        self.weights = weights
        self.threshold = threshold
        self.p_outpaint = p_outpaint
        self.deterministic = weights is not None and threshold[0] == threshold[1] and p_outpaint in (0.0, 1.0)

    def sample_transform(self) -> SampleTransform:
        """Return what draws the hole, or what a network needs to know of the sample's draws.

        Raises:
            ConfigError: the network's weights are not there, with their licence and where they are usually found.
        """
        if self.weights is None:
            return self._draw_mask
        find_file(self.weights, SALIENCY)
        return self._draw_threshold

    def _draw_mask(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        _, height, width = image.shape
        mask = random_mask(height, width, generator)
        outpaint = between(0, 1, generator) < self.p_outpaint
        return {"control_mask": mask ^ np.uint8(outpaint)}

    def _draw_threshold(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        low, high = self.threshold
        threshold = between(low, high, generator)
        outpaint = between(0, 1, generator) < self.p_outpaint
        return {
            "control_threshold": np.full((1, 1, 1), threshold, dtype=np.float32),
            "control_outpaint": np.full((1, 1, 1), outpaint),
        }

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Load the network where there is one.

        Raises:
            ConfigError: its weights are not there, with their licence and where they are usually found.
        """
        if self.weights is None:
            return masked
        network = SaliencyNetwork().eval().requires_grad_(False)
        load_weights(network, self.weights, SALIENCY, device=device)

        @torch.no_grad()
        def salient(image_BCHW: Tensor, made: Mapping[str, Tensor]) -> Tensor:
            mask_B1HW = salient_mask(network, image_BCHW, made["control_threshold"], made["control_outpaint"])
            return masked(image_BCHW, {"control_mask": mask_B1HW})

        return salient


@torch.no_grad()
def masked(image_BCHW: Tensor, made: Mapping[str, Tensor]) -> Tensor:
    """Return pictures (B, 3, H, W) with 1 in the hole `control_mask`, (B, 1, H, W), and the hole: (B, 4, H, W)."""
    mask_B1HW = made["control_mask"].bool()
    return torch.cat([image_BCHW.masked_fill(mask_B1HW, 1.0), mask_B1HW.to(image_BCHW.dtype)], dim=1)


def salient_mask(network: SaliencyNetwork, image_BCHW: Tensor, threshold_B111: Tensor, outpaint_B111: Tensor) -> Tensor:
    """Return the rounded mask (B, 1, H, W) bool of what is salient in pictures (B, 3, H, W), or of all else."""
    height, width = image_BCHW.shape[-2:]
    shorter = min(height, width)
    size = [min(SALIENCY_SIDE * side // shorter, SALIENCY_SIDE * LONGEST) for side in (height, width)]
    small_BCHW = F.interpolate(image_BCHW, size=size, mode="bilinear", antialias=True)
    mask_B1HW = (network(small_BCHW) > threshold_B111) ^ outpaint_B111
    mask_B1HW = F.interpolate(mask_B1HW.float(), size=(height, width), mode="nearest")
    return blurred(mask_B1HW, BLUR_KERNEL) > 0.5


def blurred(map_B1HW: Tensor, kernel: int) -> Tensor:
    """Blur maps (B, 1, H, W) by a Gaussian of this odd width in pixels, borders mirrored.

    Its sigma is 0.15 kernel + 0.35, as in torchvision and OpenCV. Where a side is too short to be mirrored, the
    Gaussian is cut.
    """
    down_B1WH = _blurred_rows(map_B1HW, kernel).transpose(2, 3)
    return _blurred_rows(down_B1WH, kernel).transpose(2, 3)


def _blurred_rows(map_B1HW: Tensor, kernel: int) -> Tensor:
    reach = min(kernel // 2, map_B1HW.shape[-1] - 1)
    position = torch.arange(-reach, reach + 1, dtype=torch.float32, device=map_B1HW.device)
    weight = torch.exp(-0.5 * (position / (0.15 * kernel + 0.35)) ** 2)
    padded = F.pad(map_B1HW, (reach, reach, 0, 0), mode="reflect")
    return F.conv2d(padded, (weight / weight.sum()).view(1, 1, 1, -1))
