"""Holes of random form and place: boxes, and brush strokes (Yu et al. 2019, Free-Form Image Inpainting)."""

from __future__ import annotations

import math

import numpy as np
import torch

from cascade_train.filters.base import between
from cascade_train.filters.parts.libraries import opencv

P_BOX = 0.5
"""Share of holes that are a box."""

BOX_SIDE = (0.2, 0.7)
STROKES = (1, 4)
BENDS = (4, 12)
STROKE_LENGTH = (0.05, 0.3)
STROKE_WIDTH = (0.03, 0.15)
"""Sides, lengths and widths are shares of the picture's; counts are drawn between the two, the second left out."""


def random_mask(height: int, width: int, generator: torch.Generator) -> np.ndarray:
    """Draw a hole (1, height, width) uint8, 1 inside; at least one pixel."""
    if between(0, 1, generator) < P_BOX:
        return _box(height, width, generator)
    return _strokes(height, width, generator)


def _box(height: int, width: int, generator: torch.Generator) -> np.ndarray:
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
    """Draw the points (N, 2) int32, x and y, of a line that turns a little less than half around at each bend."""
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
