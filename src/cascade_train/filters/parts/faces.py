"""Faces in a picture and who they are: a detector and a recogniser of the InsightFace family, run by onnxruntime.

Lives here: what goes into the two networks and what their outputs mean. Must not live here: the control map that is
made of faces (identity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cascade_train.filters.parts.libraries import opencv

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

DETECTOR_SIDE = 320
"""Side in pixels of the square that the detector sees: the picture in its upper left corner, zeros beside it."""

STRIDES = (8, 16, 32)
ANCHORS = 2
"""The detector looks at each place of three grids, and gives two candidates for each."""

OUTPUTS = 3 * len(STRIDES)
"""Of a detector: scores, distances and offsets, each for every grid."""

SCORE_THRESHOLD = 0.5
OVERLAP_THRESHOLD = 0.4
FACE_SIDE = 112
"""Side in pixels of the aligned face that the recogniser sees."""

LANDMARKS = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Where eyes, nose and corners of the mouth, x and y, lie in an aligned face (Deng et al. 2019, ArcFace)."""


@dataclass(frozen=True)
class Faces:
    """Faces in one picture.

    Attributes:
        boxes: (N, 4) float32, left, top, right and bottom in pixels.
        landmarks: (N, 5, 2) float32, x and y in pixels.
    """

    boxes: np.ndarray
    landmarks: np.ndarray

    def __len__(self) -> int:
        return len(self.boxes)

    def take(self, rows: np.ndarray) -> Faces:
        """Return some of them, in this order."""
        return Faces(self.boxes[rows], self.landmarks[rows])


def detect(detector: InferenceSession, image: np.ndarray, *, max_faces: int) -> Faces:
    """Find faces in a picture (H, W, 3) uint8 RGB: the surest first; of too many, large ones near the middle.

    SCRFD (Guo et al. 2021): distances to the sides of a box and offsets of landmarks, in strides, from each place.
    """
    seen, scale = letterboxed(image)
    network_input = ((seen.astype(np.float32) - 127.5) / 128).transpose(2, 0, 1)[None]
    outputs = detector.run(None, {detector.get_inputs()[0].name: network_input})
    scores, boxes, landmarks = (np.concatenate(part) for part in zip(*_candidates(outputs), strict=True))
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= SCORE_THRESHOLD]
    found = Faces(boxes[order] / scale, landmarks[order] / scale)
    found = found.take(distinct(found.boxes))
    if len(found) <= max_faces:
        return found
    return found.take(np.argsort(-prominence(found.boxes, image.shape[:2]), kind="stable")[:max_faces])


def letterboxed(image: np.ndarray) -> tuple[np.ndarray, float]:
    """Return a picture (H, W, 3) in the corner of the detector's square, and by how much it was scaled."""
    cv2 = opencv()
    height, width = image.shape[:2]
    longer = max(height, width)
    tall, wide = max(1, DETECTOR_SIDE * height // longer), max(1, DETECTOR_SIDE * width // longer)
    seen = np.zeros((DETECTOR_SIDE, DETECTOR_SIDE, 3), dtype=np.uint8)
    seen[:tall, :wide] = cv2.resize(image, (wide, tall))
    return seen, tall / height


def _candidates(outputs: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return scores (N,), boxes (N, 4) and landmarks (N, 5, 2) of each grid, in the detector's pixels."""
    found = []
    for place, stride in enumerate(STRIDES):
        score, distance, offset = (
            outputs[place + kind * len(STRIDES)].reshape(-1, n) for kind, n in enumerate((1, 4, 10))
        )
        side = DETECTOR_SIDE // stride
        down, across = np.mgrid[:side, :side] * float(stride)
        middle = np.stack([across, down], axis=-1).reshape(-1, 1, 2).repeat(ANCHORS, axis=0).astype(np.float32)
        corners = np.array([[-1.0], [1.0]], dtype=np.float32) * distance.reshape(-1, 2, 2) * stride
        found.append((score[:, 0], (middle + corners).reshape(-1, 4), middle + offset.reshape(-1, 5, 2) * stride))
    return found


def distinct(boxes: np.ndarray) -> np.ndarray:
    """Return the rows of boxes (N, 4), the best first, that overlap with no better one by more than the threshold."""
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    left = np.arange(len(boxes))
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        low, high = np.maximum(boxes[left, :2], boxes[best, :2]), np.minimum(boxes[left, 2:], boxes[best, 2:])
        shared = np.prod(np.maximum(0.0, high - low + 1), axis=1)
        left = left[shared / (areas[left] + areas[best] - shared) <= OVERLAP_THRESHOLD]
    return np.array(kept, dtype=np.int64)


def prominence(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return area less twice the squared distance from the picture's middle, (N,), by which InsightFace chooses."""
    area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2 - np.array([size[1] // 2, size[0] // 2])
    return area - 2 * (middle**2).sum(axis=1)


def recognise(recogniser: InferenceSession, image: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    """Return who a face is, (512,) float32 of length 1, of a picture (H, W, 3) uint8 RGB and landmarks (5, 2)."""
    cv2 = opencv()
    face = cv2.warpAffine(image, similarity(landmarks, LANDMARKS), (FACE_SIDE, FACE_SIDE), borderValue=0)
    network_input = ((face.astype(np.float32) - 127.5) / 127.5).transpose(2, 0, 1)[None]
    [found] = recogniser.run(None, {recogniser.get_inputs()[0].name: network_input})
    who = found.reshape(-1)
    return who / max(np.linalg.norm(who), 1e-12)


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the (2, 3) rotation, scale and shift that best takes points (N, 2) to others (Umeyama 1991)."""
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    centred = source - source_mean
    u, d, vt = np.linalg.svd((target - target_mean).T @ centred / len(source))
    sign = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u @ np.diag(sign) @ vt
    variance = (centred**2).sum() / len(source)
    scale = (d * sign).sum() / variance if variance > 0 else 1.0
    return np.concatenate([scale * rotation, (target_mean - scale * rotation @ source_mean)[:, None]], axis=1)
