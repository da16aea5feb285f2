"""The contract of a control filter: from a training picture to the map that a ControlNet is conditioned on.

A filter has two halves. The first runs in the data workers, on one picture with its own generator, and returns small
arrays. The second runs on the device, on the whole batch, and makes the map from them and from the pictures. A filter
itself holds only its arguments, which conf/filter documents; any one filter has a file of its own.

Shape legend: B batch, C channels of the map, H W image size, h w size of the map (any).
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError

CONTROL = "control"
"""Name of a finished map among a batch's tensors, as a cache holds it; workers' arrays are named `control_…`."""

DISC = 0.3
"""Largest squared distance from the middle of a disc's square of side 1; corners, at 0.5, lie outside."""

Encode = Callable[[Tensor], Tensor]
"""The stage's own frozen encoder: images (B, 3, H, W) float in [0, 1] to latents (B, C, h, w) fp32."""

ControlMap = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""The half on the device: images (B, 3, H, W) float in [0, 1], and what the workers made of them, to maps (B, C, h, w).

Maps are fp32, without gradient. Must not sync with the host.
"""


class ControlFilter(abc.ABC):
    """What a ControlNet is conditioned on. Constructors take keywords, are cheap, and check them (ValueError).

    Every argument is kept as an attribute of the same name, for `node`.

    Attributes:
        channels: of the map.
        deterministic: equal pictures always have equal maps, so that maps may be kept beside latents.
    """

    channels: int
    deterministic: bool = True

    def sample_transform(self) -> SampleTransform:
        """Function that data workers apply to a picture; can be pickled. By default it makes nothing.

        Every array it returns is named `control_…`. Called once in each training process, before any worker starts.
        Raises as `build`.
        """
        return make_nothing

    @abc.abstractmethod
    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Make the half that runs on the device; `encode` is for filters whose map is a latent.

        Raises:
            ConfigError: a file that it needs is missing, or holds something else; with its licence and usual place.
        """

    def preview(self, control_BCHW: Tensor, image_BCHW: Tensor | None = None) -> Tensor:
        """Images (B, 3, h, w) in [0, 1] of maps (B, C, h, w), over pictures (B, 3, H, W) if known."""
        return to_colours(control_BCHW)

    def node(self) -> dict[str, Any]:
        """Filter as a configuration node, for the metadata of weights."""
        arguments = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {"_target_": f"{type(self).__module__}.{type(self).__qualname__}", **arguments}


class ImageFilter(ControlFilter):
    """A filter that needs no device: `apply` makes the map of one picture, in the data workers."""

    at_picture_size: bool = False  # whether maps are resized to the size of the pictures

    @abc.abstractmethod
    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Map (C, h, w) of one picture (3, H, W) uint8 RGB; random choices come from `generator` alone.

        A uint8 map stands for value / 255, a float32 map for itself. Pictures of one size have maps of one size.
        """

    def sample_transform(self) -> SampleTransform:
        """`apply` as the workers call it."""
        return self._make

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Converts the workers' map to fp32, at its own size or that of the pictures."""
        return map_at_picture_size if self.at_picture_size else float_map

    def _make(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        map_CHW = np.asarray(self.apply(image, generator))
        if map_CHW.ndim != 3 or map_CHW.shape[0] != self.channels or map_CHW.dtype not in (np.uint8, np.float32):
            raise ConfigError(
                f"task.filter: {type(self).__name__} made a map of shape {map_CHW.shape} and {map_CHW.dtype}; it must"
                f" be ({self.channels}, height, width), uint8 or float32: mend `apply`, or `channels`"
            )
        return {"control_map": map_CHW}


def map_maker(control_filter: ControlFilter, *, device: torch.device, encode: Encode) -> ControlMap:
    """`build`, with a check of its maps: a ConfigError unless they are (B, C, h, w)."""
    make = control_filter.build(device=device, encode=encode)

    def make_map(image_BCHW: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        map_BCHW, wanted = make(image_BCHW, arrays), (len(image_BCHW), control_filter.channels)
        if not isinstance(map_BCHW, Tensor) or map_BCHW.ndim != 4 or map_BCHW.shape[:2] != wanted:
            shape = tuple(map_BCHW.shape) if isinstance(map_BCHW, Tensor) else type(map_BCHW).__name__
            raise ConfigError(
                f"task.filter: {type(control_filter).__name__} made maps of {shape}; they must be a tensor of"
                f" {wanted} x height x width: mend what `build` returns, or `channels`"
            )
        return map_BCHW

    return make_map


def make_nothing(image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
    """Nothing: for filters that do all on the device."""
    return {}


@torch.no_grad()
def float_map(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """The workers' `control_map` in fp32, (B, C, h, w); uint8 is divided by 255."""
    map_BCHW = maps["control_map"]
    return map_BCHW / 255 if map_BCHW.dtype == torch.uint8 else map_BCHW.float()


def map_at_picture_size(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """The workers' `control_map`, resized to the pictures, (B, C, H, W) fp32."""
    return resize_map(float_map(image_BCHW, maps), image_BCHW.shape[-2:])


def transform_images(
    transform: SampleTransform, image_BCHW: Tensor, generators: Sequence[torch.Generator]
) -> dict[str, Tensor]:
    """Apply a `sample_transform` to pictures (B, 3, H, W) uint8; returns tensors (B, …) by name."""
    pairs = zip(image_BCHW.numpy(), generators, strict=True)
    rows = [transform(image, generator) for image, generator in pairs]
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def resize_map(map_BCHW: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (B, C, h, w) to `size` (height, width), bilinear, without antialiasing."""
    if map_BCHW.shape[-2:] == torch.Size(size):
        return map_BCHW
    return F.interpolate(map_BCHW, size=tuple(size), mode="bilinear", align_corners=False)


def check_threshold(pair: Sequence[float]) -> None:
    """Check the range from which each sample draws a threshold."""
    if len(pair) != 2 or not 0.0 <= pair[0] <= pair[1] <= 1.0:
        raise ConfigError(f"task.filter.threshold={pair} must be two numbers with 0 <= low <= high <= 1, as [0.1, 0.4]")


def check_kernels(key: str, kernels: Sequence[int]) -> None:
    """Raise ValueError where there is no width, or one is neither 0 nor odd from 3 on."""
    if not kernels or any(kernel != 0 and (kernel < 3 or kernel % 2 == 0) for kernel in kernels):
        raise ValueError(f"{key}={kernels}: each sample draws one of these widths; give odd numbers from 3 on, or 0")


def pick(options: Sequence[int], generator: torch.Generator) -> int:
    """Draw one of the options, each as likely as the others."""
    return options[int(torch.randint(len(options), (1,), generator=generator))]


def between(low: float, high: float, generator: torch.Generator) -> float:
    """Draw a number, uniform in [low, high)."""
    return low + (high - low) * float(torch.rand(1, generator=generator))


def to_colours(control_BCHW: Tensor) -> Tensor:
    """Colours (B, 3, h, w) in [0, 1] of maps of any number of channels.

    One channel becomes grey, the first three of three or four red, green and blue; of more, each channel gets a hue of
    the colour wheel, and each picture is scaled to its range.
    """
    channels = control_BCHW.shape[1]
    if channels <= 4:
        shown_BCHW = control_BCHW[:, :3] if channels >= 3 else control_BCHW[:, :1].expand(-1, 3, -1, -1)
        return shown_BCHW.float().clamp(0, 1)
    angle = torch.arange(channels, device=control_BCHW.device) / channels
    shift = torch.arange(3, device=control_BCHW.device) / 3
    wheel = torch.cos(2 * torch.pi * (angle[None] - shift[:, None])) / channels**0.5
    shown_BCHW = torch.einsum("dc,bchw->bdhw", wheel, control_BCHW.float())
    low, high = shown_BCHW.amin(dim=(1, 2, 3), keepdim=True), shown_BCHW.amax(dim=(1, 2, 3), keepdim=True)
    return (shown_BCHW - low) / (high - low).clamp(min=1e-6)


def disc(diameter: int) -> np.ndarray:
    """A disc (diameter, diameter) uint8, 1 inside (Stable Cascade, modules/controlnet.py)."""
    square = np.linspace(-0.5, 0.5, diameter, dtype=np.float32) ** 2
    return (square[None, :] + square[:, None] < DISC).astype(np.uint8)


def dilate(map_B1HW: Tensor, diameter: int) -> Tensor:
    """Dilate maps (B, 1, H, W) by a disc; a diameter of 0 leaves them."""
    if diameter == 0:
        return map_B1HW
    reach, rows = diameter // 2, []
    height = map_B1HW.shape[-2]
    padded = F.pad(map_B1HW, (0, 0, reach, reach), value=-torch.inf)
    for place, width in enumerate(disc(diameter).sum(axis=1).tolist()):
        row = padded[..., place : place + height, :]
        rows.append(F.max_pool2d(row, (1, width), stride=1, padding=(0, width // 2)))
    return torch.stack(rows).amax(dim=0)
