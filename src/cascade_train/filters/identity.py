"""Faces in a picture: the embedding of each, painted into its bounding box."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, between
from cascade_train.filters.parts.requirements import Session, WeightsFile, open_session, opencv, require
from cascade_train.options import File, Positive, Share, check_fields

STRIDE = 32
"""Pixels for each place of the map, as for latents of Stage C."""

WIDTH = 512
DETECTOR = WeightsFile(
    key="task.filter.detector",
    what="the face detector of the identity filter",
    usual_name="det_10g.onnx",
    licence="non-commercial research alone, by InsightFace",
    found="the pack buffalo_l of github.com/deepinsight/insightface",
)
_WHAT = "the face recogniser of the identity filter"
RECOGNISER = replace(DETECTOR, key="task.filter.recogniser", what=_WHAT, usual_name="w600k_r50.onnx")

DETECTOR_SIDE = 320
"""Side in pixels of the detector's input: the picture in its upper left corner, zeros beside it."""

STRIDES = (8, 16, 32)
ANCHORS = 2
OUTPUTS = 3 * len(STRIDES)
"""The detector has three grids with two candidates at each place, and for each grid scores, distances and offsets."""

SCORE_THRESHOLD = 0.5
OVERLAP_THRESHOLD = 0.4
FACE_SIDE = 112
"""Side in pixels of the aligned face that the recogniser sees."""

LANDMARKS = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Where eyes, nose and corners of the mouth, x and y, lie in an aligned face (Deng et al. 2019, ArcFace)."""


@dataclass(kw_only=True, eq=False)
class IdentityFilter(ControlFilter):
    """512 channels for each 32 x 32 pixels: the vector of the face that is there, zeros elsewhere.

    Stable Cascade, modules/controlnet.py, `IdentityFilter`. Faces are found by an SCRFD network and recognised by an
    ArcFace network of 512 numbers, both in the data workers, on one thread each. Needs onnxruntime and OpenCV.
    """

    channels = WIDTH

    detector: File[str]
    recogniser: File[str]
    max_faces: Positive[int]
    p_drop: Share[float]
    p_full: Share[float]

    def __post_init__(self) -> None:
        require("onnxruntime")
        require("cv2")
        check_fields(self, "task.filter.")
        self.deterministic = self.p_drop in (0.0, 1.0) and self.p_full in (0.0, 1.0)

    def sample_transform(self) -> SampleTransform:
        """Detects and embeds faces in the workers; both networks are opened now, so that a bad file fails early."""
        self._sessions()
        return self._find

    def _sessions(self) -> list[Session]:
        """Detector and recogniser, which are opened once in each process."""
        sessions = []
        for source, known, wanted in ((self.detector, DETECTOR, OUTPUTS), (self.recogniser, RECOGNISER, 1)):
            sessions.append(open_session(source, known))
            outputs = len(sessions[-1].get_outputs())
            if outputs != wanted:
                raise ConfigError(f"{known.key}={source}: is a network of {outputs} outputs, not of {wanted}. {known}")
        return sessions

    def _find(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
        detector, recogniser = self._sessions()
        seen = detect(detector, pixels, max_faces=self.max_faces)
        faces = np.zeros((self.max_faces, WIDTH), dtype=np.float32)
        for place, landmarks in enumerate(seen.landmarks):
            faces[place] = recognise(recogniser, pixels, landmarks)
        return {"control_faces": faces, "control_cells": self._cells(seen, pixels.shape[:2], generator)}

    def _cells(self, seen: Faces, size: tuple[int, int], generator: torch.Generator) -> np.ndarray:
        """Left, top, right, bottom of each face in the map, (max_faces, 4) int32; 0 = none."""
        cells = np.zeros((self.max_faces, 4), dtype=np.int32)
        for place, box in enumerate(seen.boxes):
            dropped, full = between(0, 1, generator) < self.p_drop, between(0, 1, generator) < self.p_full
            if dropped:
                continue
            left, top, right, bottom = np.rint(np.maximum(np.trunc(box) / STRIDE, 0)).astype(int)
            cells[place] = left, top, max(right, left + 1), max(bottom, top + 1)
            if full and len(seen.boxes) == 1:
                cells[place] = 0, 0, *grid(size)[::-1]
        return cells

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Draws embeddings into maps, (B, 512, H / 32, W / 32); a later face covers earlier ones."""
        return paint_faces

    def preview(self, control_BCHW: Tensor, image_BCHW: Tensor | None = None) -> Tensor:
        """Colours of the vectors, over the pictures where they are known."""
        colours_BCHW = super().preview(control_BCHW)
        if image_BCHW is None:
            return colours_BCHW
        size = image_BCHW.shape[-2:]
        is_face_B1HW = F.interpolate((control_BCHW != 0).any(dim=1, keepdim=True).float(), size=size) > 0
        return torch.where(is_face_B1HW, (image_BCHW + F.interpolate(colours_BCHW, size=size)) / 2, image_BCHW)


def grid(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the map of a picture of `size` (height, width); at least 1."""
    height, width = size
    return max(1, height // STRIDE), max(1, width // STRIDE)


@torch.no_grad()
def paint_faces(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """Maps (B, 512, h, w) of faces (B, F, 512) in their cells (B, F, 4)."""
    height, width = image_BCHW.shape[-2:]
    height, width = grid((height, width))
    down, across = (torch.arange(side, device=image_BCHW.device) for side in (height, width))
    map_BCHW = image_BCHW.new_zeros(len(image_BCHW), WIDTH, height, width)
    for cells_B4, face_BC in zip(maps["control_cells"].unbind(1), maps["control_faces"].unbind(1), strict=True):
        left_B1, top_B1, right_B1, bottom_B1 = cells_B4[..., None].unbind(1)
        rows, columns = (down >= top_B1) & (down < bottom_B1), (across >= left_B1) & (across < right_B1)
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        map_BCHW = torch.where(inside, face_BC[..., None, None], map_BCHW)
    return map_BCHW


class Faces(NamedTuple):
    """Boxes (N, 4) float32, left, top, right, bottom, and landmarks (N, 5, 2) float32, x, y, of faces, in pixels."""

    boxes: np.ndarray
    landmarks: np.ndarray


def detect(detector: Session, image: np.ndarray, *, max_faces: int) -> Faces:
    """Find faces in a picture (H, W, 3) uint8 RGB: the surest first; of too many, large ones near the middle.

    SCRFD (Guo et al. 2021): distances to the sides of a box and offsets of landmarks, in strides, from each place.
    """
    seen, scale = letterbox(image)
    network_input = ((seen.astype(np.float32) - 127.5) / 128).transpose(2, 0, 1)[None]
    outputs = detector.run(None, {detector.get_inputs()[0].name: network_input})
    scores, boxes, landmarks = (np.concatenate(part) for part in zip(*_candidates(outputs), strict=True))
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= SCORE_THRESHOLD]
    boxes, landmarks = boxes[order] / scale, landmarks[order] / scale
    kept = suppress_overlaps(boxes)
    if len(kept) > max_faces:
        kept = kept[np.argsort(-prominence(boxes[kept], image.shape[:2]), kind="stable")[:max_faces]]
    return Faces(boxes[kept], landmarks[kept])


def letterbox(image: np.ndarray) -> tuple[np.ndarray, float]:
    """A picture (H, W, 3) in the corner of the detector's square, and by how much it was scaled."""
    cv2 = opencv()
    height, width = image.shape[:2]
    longer = max(height, width)
    tall, wide = max(1, DETECTOR_SIDE * height // longer), max(1, DETECTOR_SIDE * width // longer)
    seen = np.zeros((DETECTOR_SIDE, DETECTOR_SIDE, 3), dtype=np.uint8)
    seen[:tall, :wide] = cv2.resize(image, (wide, tall))
    return seen, tall / height


def _candidates(outputs: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Scores (N,), boxes (N, 4) and landmarks (N, 5, 2) of each grid, in the detector's pixels."""
    candidates = []
    for place, stride in enumerate(STRIDES):
        of_grid = outputs[place :: len(STRIDES)]
        score, distance, offset = (output.reshape(-1, n) for output, n in zip(of_grid, (1, 4, 10), strict=True))
        side = DETECTOR_SIDE // stride
        down, across = np.mgrid[:side, :side] * float(stride)
        middle = np.stack([across, down], axis=-1).reshape(-1, 1, 2).repeat(ANCHORS, axis=0).astype(np.float32)
        corners = np.array([[-1.0], [1.0]], dtype=np.float32) * distance.reshape(-1, 2, 2) * stride
        candidates.append((score[:, 0], (middle + corners).reshape(-1, 4), middle + offset.reshape(-1, 5, 2) * stride))
    return candidates


def suppress_overlaps(boxes: np.ndarray) -> np.ndarray:
    """Rows of boxes (N, 4), the best first, without those that overlap a better one."""
    sizes = boxes[:, 2:] - boxes[:, :2] + 1
    ranks = np.arange(len(boxes), 0, -1)
    kept = opencv().dnn.NMSBoxes(np.hstack([boxes[:, :2], sizes]).tolist(), ranks.tolist(), 0.0, OVERLAP_THRESHOLD)
    return np.array(kept, dtype=np.int64)


def prominence(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Area - 2 distance² from the picture's middle, (N,), by which InsightFace chooses."""
    area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2 - np.array([size[1] // 2, size[0] // 2])
    return area - 2 * (middle**2).sum(axis=1)


def recognise(recogniser: Session, image: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    """A face's embedding, (512,) float32 of length 1, by a picture (H, W, 3) uint8 RGB and landmarks (5, 2)."""
    cv2 = opencv()
    face = cv2.warpAffine(image, similarity(landmarks, LANDMARKS), (FACE_SIDE, FACE_SIDE), borderValue=0)
    network_input = ((face.astype(np.float32) - 127.5) / 127.5).transpose(2, 0, 1)[None]
    [embedding] = recogniser.run(None, {recogniser.get_inputs()[0].name: network_input})
    who = embedding.reshape(-1)
    return who / max(np.linalg.norm(who), 1e-12)


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(2, 3) rotation, scale and shift that best takes points (N, 2) to others (Umeyama 1991)."""
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    centred = source - source_mean
    u, d, vt = np.linalg.svd((target - target_mean).T @ centred / len(source))
    sign = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u @ np.diag(sign) @ vt
    variance = (centred**2).sum() / len(source)
    scale = (d * sign).sum() / variance if variance > 0 else 1.0
    return np.concatenate([scale * rotation, (target_mean - scale * rotation @ source_mean)[:, None]], axis=1)
