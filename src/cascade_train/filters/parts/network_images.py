"""What goes into a user's network and what comes out: shared by networks in the workers and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.errors import ConfigError

Scaling = Literal["picture", "none"]
"""picture = each picture's map is brought to [0, 1] by its own range; none = the network's numbers."""


def check_options(*, channels: int, resize: int | None, mean: Sequence[float], std: Sequence[float]) -> None:
    """Check what a network's images and maps are like.

    Raises:
        ValueError: a number out of range.
    """
    if channels < 1:
        raise ValueError(f"channels={channels}: a map needs at least one, give the number that the network makes")
    if resize is not None and resize < 1:
        raise ValueError(f"resize={resize}: is the side of what the network sees, give 1 px or more, or null")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"mean={mean}, std={std}: give three numbers each, for red, green and blue, std above 0")


def network_input(image_BCHW: Tensor, *, resize: int | None, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return what a network sees of pictures (B, 3, H, W) float in [0, 1]: square, if `resize`, and normalised."""
    if resize is not None:
        image_BCHW = F.interpolate(image_BCHW, size=(resize, resize), mode="bilinear", antialias=True)
    shape = (1, 3, 1, 1)
    return (image_BCHW - image_BCHW.new_tensor(mean).view(shape)) / image_BCHW.new_tensor(std).view(shape)


def network_map(output: Tensor, *, channels: int, scaling: Scaling, key: str) -> Tensor:
    """Return maps (B, channels, h, w) fp32 of a network's output, (B, C, h, w) or (B, h, w).

    Raises:
        ConfigError: an output of another form, or with fewer channels.
    """
    map_BCHW = output.float()[:, None] if output.dim() == 3 else output.float()
    if map_BCHW.dim() != 4 or map_BCHW.shape[1] < channels:
        raise ConfigError(
            f"{key}: the network's output has shape {tuple(output.shape)}, which holds no maps of {channels} channels,"
            " (batch, channels, height, width); choose another task.filter.output or task.filter.channels"
        )
    map_BCHW = map_BCHW[:, :channels]
    if scaling == "none":
        return map_BCHW
    low, high = map_BCHW.amin(dim=(1, 2, 3), keepdim=True), map_BCHW.amax(dim=(1, 2, 3), keepdim=True)
    return (map_BCHW - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
