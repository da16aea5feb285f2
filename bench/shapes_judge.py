"""What a picture of the shapes data shows, read off its pixels by what is known of how such pictures are drawn.

The background is the median of the border; the object's colour is the median of what differs most from it; how far each
pixel lies between the two is a soft mask; and of all outlines that the procedure could have drawn there, the nearest in
squared distance gives shape, size and position. An object on the left and one on the right are `sides`. Nothing is
learned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from cascade_train.data.shapes import COLOURS, GRID, PLACES, POSITIONS, RADII, SHAPES, Scene, outline_mask

ATTRIBUTES = tuple(field.name for field in fields(Scene))
NOTHING = "nothing"
"""What is read of an object that is not there."""

_OF_OUTLINE = ("shape", "size", "position")
_SIDE = 40  # of the window that an outline is compared in: the largest one fits
_BORDER = 3
_OVERSAMPLING = 4
_DISTINCT = 0.003  # squared distance of two colours in [0, 1]; the nearest two of the procedure differ by more
_SCALES = (0.92, 1.0, 1.08)
_DEGREES = (-6.0, 0.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Outlines:
    """All outlines that are compared, each in a window with its centroid in the middle.

    Attributes:
        names: shape and size of each.
        masks_NP: (N, _SIDE ** 2) fp32 in [0, 1].
        offsets_N2: (N, 2) where the shape's own centre lies from the centroid, x and y in pixels.
    """

    names: tuple[tuple[str, str], ...]
    masks_NP: np.ndarray
    offsets_N2: np.ndarray


@functools.cache
def outlines(image_size: int) -> Outlines:
    """Draw each shape in each size, a bit larger and smaller and turned both ways, for pictures of `image_size`."""
    names, masks, offsets = [], [], []
    side = _SIDE * _OVERSAMPLING
    variants = [(scale, degrees) for scale in _SCALES for degrees in _DEGREES]
    for shape in SHAPES:
        for size, share in RADII.items():
            for scale, degrees in variants:
                radius = share * scale * image_size * _OVERSAMPLING
                draw = functools.partial(outline_mask, shape, side, radius=radius, degrees=degrees)
                x, y = _centroid(np.asarray(draw(centre=(side / 2, side / 2)).reduce(_OVERSAMPLING)))
                mask = draw(centre=(side - x * _OVERSAMPLING, side - y * _OVERSAMPLING)).reduce(_OVERSAMPLING)
                names.append((shape, size))
                masks.append(np.asarray(mask).reshape(-1) / np.float32(255))
                offsets.append((_SIDE / 2 - x, _SIDE / 2 - y))
    return Outlines(names=tuple(names), masks_NP=np.stack(masks), offsets_N2=np.array(offsets))


def judge(image_HW3: np.ndarray) -> dict[str, str]:
    """Return what a square picture, (H, W, 3) float in [0, 1], shows, by attribute of a scene."""
    background = np.median(_border(image_HW3), axis=0)
    distance_HW = np.linalg.norm(image_HW3 - background, axis=-1)
    colour = np.median(image_HW3[distance_HW >= 0.6 * np.quantile(distance_HW, 0.998)], axis=0)
    read = {"colour": _nearest(colour), "background": _nearest(background)}
    contrast = colour - background
    if contrast @ contrast < _DISTINCT:
        return read | dict.fromkeys(_OF_OUTLINE, NOTHING)
    mask_HW = np.clip((image_HW3 - background) @ contrast / (contrast @ contrast), 0, 1)
    return read | (_both_sides(mask_HW) or _object(mask_HW))


def _both_sides(mask_HW: np.ndarray) -> dict[str, str] | None:
    """Return what is read where each half of a picture shows an object of its own, one left and one right; else None.

    A shape or size that is not the same in both is nothing.
    """
    left = np.arange(mask_HW.shape[1]) < mask_HW.shape[1] / 2
    halves = [_object(mask_HW * half) for half in (left, ~left)]
    if tuple(half["position"] for half in halves) != PLACES["sides"]:
        return None
    first, second = halves
    return {name: word if word == second[name] else NOTHING for name, word in first.items()} | {"position": "sides"}


def _object(mask_HW: np.ndarray) -> dict[str, str]:
    """Return shape, size and position of the nearest outline, or nothing where less than half of it is there."""
    inside_HW = np.where(mask_HW > 0.25, mask_HW, 0)
    if not inside_HW.any():
        return dict.fromkeys(_OF_OUTLINE, NOTHING)
    centroid = _centroid(inside_HW)
    known = outlines(len(mask_HW))
    seen_P = _window(mask_HW, *centroid).reshape(-1)
    best = int(((known.masks_NP - seen_P) ** 2).sum(axis=1).argmin())
    outline_P = known.masks_NP[best]
    if seen_P @ outline_P < outline_P @ outline_P / 2:
        return dict.fromkeys(_OF_OUTLINE, NOTHING)
    cell = _cell((np.array(centroid) + known.offsets_N2[best]) / len(mask_HW))
    return dict(zip(_OF_OUTLINE, (*known.names[best], cell), strict=True))


def accuracies(images: Iterable[np.ndarray], scenes: Sequence[Scene]) -> dict[str, float]:
    """Return the share of pictures on which each attribute is as in the scene, and on which all are, as `all`."""
    hits = np.array([_hits(judge(image), scene) for image, scene in zip(images, scenes, strict=True)])
    return dict(zip(ATTRIBUTES, hits.mean(axis=0).tolist(), strict=True)) | {"all": float(hits.all(axis=1).mean())}


def _hits(read: Mapping[str, str], scene: Scene) -> list[bool]:
    return [read[attribute] == getattr(scene, attribute) for attribute in ATTRIBUTES]


def _border(image_HW3: np.ndarray) -> np.ndarray:
    rows, columns = np.indices(image_HW3.shape[:2])
    last = len(image_HW3) - 1
    return image_HW3[np.minimum.reduce([rows, columns, last - rows, last - columns]) < _BORDER]


def _nearest(colour: np.ndarray) -> str:
    values = np.array(list(COLOURS.values())) / 255
    return list(COLOURS)[int(((values - colour) ** 2).sum(axis=1).argmin())]


def _centroid(mask_HW: np.ndarray) -> tuple[float, float]:
    """Return x and y in pixels; the middle of the first pixel is 0.5."""
    ys, xs = np.indices(mask_HW.shape) + 0.5
    total = mask_HW.sum()
    return float((mask_HW * xs).sum() / total), float((mask_HW * ys).sum() / total)


def _window(mask_HW: np.ndarray, x: float, y: float) -> np.ndarray:
    """Return the (_SIDE, _SIDE) square of a mask around a point, interpolated between pixels; zeros beyond the mask."""
    padded = np.pad(mask_HW, _SIDE)
    left, top = x + _SIDE / 2, y + _SIDE / 2
    column, row = int(left), int(top)
    part = padded[row : row + _SIDE + 1, column : column + _SIDE + 1]
    part = part[:, :-1] * (1 - left + column) + part[:, 1:] * (left - column)
    return part[:-1] * (1 - top + row) + part[1:] * (top - row)


def _cell(centre: np.ndarray) -> str:
    """Return the position nearest to x and y in sides of the picture."""
    cells = {name: np.array([GRID[k] for k in place]) for name, place in POSITIONS.items()}
    return min(cells, key=lambda name: float(((cells[name] - centre) ** 2).sum()))
