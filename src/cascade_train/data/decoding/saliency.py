"""Where a picture stands out, cheaply and the same everywhere: the spectral residual, no network.

Hou and Zhang, "Saliency detection: a spectral residual approach" (CVPR 2007).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

_SIDE = 64  # px; the paper's size, at which objects stand out and texture does not
_TIE = 0.02  # share of the best score by which a place must be worse to lose against one nearer to the middle


def salient_offset(pixels: np.ndarray, height: int, width: int) -> tuple[float, float]:
    """Return where a window holds most of what stands out.

    Args:
        pixels: (H, W, 3) uint8 RGB.
        height: of the window, at most H.
        width: of the window, at most W.

    Returns:
        Place of the window across and down, each in [0, 1] of the room that the picture leaves it; of places that are
        about as good, the one nearest to the middle.
    """
    gray = _thumbnail(pixels)
    if gray.min() == gray.max():
        return 0.5, 0.5
    saliency = spectral_residual(gray)
    across = _best_place(saliency.sum(axis=0), width / pixels.shape[1])
    down = _best_place(saliency.sum(axis=1), height / pixels.shape[0])
    return across, down


def spectral_residual(gray: np.ndarray) -> np.ndarray:
    """Return how much each place of a (H, W) picture stands out, (H, W) float64 >= 0 (equations 1 to 5)."""
    spectrum = np.fft.fft2(gray)
    log_amplitude = np.log(np.abs(spectrum) + 1e-8)
    residual = log_amplitude - _blurred(log_amplitude, 1)
    map_HW = np.abs(np.fft.ifft2(np.exp(residual + 1j * np.angle(spectrum)))) ** 2
    return _blurred(map_HW, 3)


def _thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Return (64, 64) float64 gray; every n-th pixel is enough to begin with."""
    stride = max(1, min(pixels.shape[:2]) // (4 * _SIDE))
    gray = Image.fromarray(np.ascontiguousarray(pixels[::stride, ::stride])).convert("L")
    return np.asarray(gray.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR), dtype=np.float64)


def _blurred(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the mean over a square of side 2 * reach + 1, twice, around the edges."""
    for axis in (0, 1, 0, 1):
        values = np.mean([np.roll(values, shift, axis) for shift in range(-reach, reach + 1)], axis=0)
    return values


def _best_place(profile: np.ndarray, share: float) -> float:
    """Return where, in [0, 1], a window of a share of the profile's length holds most of it."""
    window = min(len(profile), max(1, round(share * len(profile))))
    sums = np.convolve(profile, np.ones(window), mode="valid")
    if len(sums) == 1:
        return 0.5
    good = np.flatnonzero(sums >= sums.max() * (1 - _TIE))
    return float(good[np.abs(good - (len(sums) - 1) / 2).argmin()] / (len(sums) - 1))
