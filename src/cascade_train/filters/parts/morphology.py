"""Discs for the dilation and erosion of maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

DISC = 0.3
"""Largest squared distance from the middle of a disc's square of side 1; corners, at 0.5, lie outside."""


def disc(diameter: int) -> np.ndarray:
    """Return a disc (diameter, diameter) uint8, 1 inside (Stable Cascade, modules/controlnet.py)."""
    square = np.linspace(-0.5, 0.5, diameter, dtype=np.float32) ** 2
    return (square[None, :] + square[:, None] < DISC).astype(np.uint8)


def dilated(map_B1HW: Tensor, diameter: int) -> Tensor:
    """Return the largest value within a disc of each place of maps (B, 1, H, W); a diameter of 0 leaves them."""
    if diameter == 0:
        return map_B1HW
    reach, rows = diameter // 2, []
    height = map_B1HW.shape[-2]
    padded = F.pad(map_B1HW, (0, 0, reach, reach), value=-torch.inf)
    for place, width in enumerate(disc(diameter).sum(axis=1).tolist()):
        row = padded[..., place : place + height, :]
        rows.append(F.max_pool2d(row, (1, width), stride=1, padding=(0, width // 2)))
    return torch.stack(rows).amax(dim=0)


def check_kernels(key: str, kernels: Sequence[int]) -> None:
    """Raise ValueError where there is no width, or one is neither 0 nor odd from 3 on."""
    if not kernels or any(kernel != 0 and (kernel < 3 or kernel % 2 == 0) for kernel in kernels):
        raise ValueError(
            f"{key}={kernels}: each sample draws one of these widths, give odd numbers of pixels from 3 on, or 0"
        )
