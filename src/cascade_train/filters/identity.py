"""Who is in a picture, and where: faces as vectors, painted into the boxes that they fill."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, between
from cascade_train.filters.parts.faces import OUTPUTS, Faces, detect, recognise
from cascade_train.filters.parts.files import WeightsFile, find_file
from cascade_train.filters.parts.libraries import require
from cascade_train.filters.parts.onnx_session import open_session
from cascade_train.options import File

STRIDE = 32
"""Pixels for each place of the map, as for latents of Stage C."""

WIDTH = 512
LICENCE = "non-commercial research alone, by InsightFace"
FOUND = "the pack buffalo_l of github.com/deepinsight/insightface"
DETECTOR = WeightsFile(
    key="task.filter.detector",
    what="the face detector of the identity filter",
    usual_name="det_10g.onnx",
    licence=LICENCE,
    found=FOUND,
)
RECOGNISER = WeightsFile(
    key="task.filter.recogniser",
    what="the face recogniser of the identity filter",
    usual_name="w600k_r50.onnx",
    licence=LICENCE,
    found=FOUND,
)


class IdentityFilter(ControlFilter):
    """512 channels for each 32 x 32 pixels: the vector of the face that is there, zeros elsewhere.

    Stable Cascade, modules/controlnet.py, `IdentityFilter`. Faces are found and recognised in the data workers, on one
    thread each.

    Args:
        detector: an SCRFD network, a local `.onnx` file or `owner/name:file` on the hub.
        recogniser: an ArcFace network of 512 numbers, a local `.onnx` file or `owner/name:file` on the hub.
        max_faces: in a picture; of more, large ones near the middle are taken.
        p_drop: share of faces that are left out, in [0, 1].
        p_full: share of pictures with one face whose vector fills the whole map, in [0, 1].

    Raises:
        ValueError: a number out of range.
        ConfigError: onnxruntime or OpenCV is not installed.
    """

    channels = WIDTH

    def __init__(
        self, *, detector: File[str], recogniser: File[str], max_faces: int, p_drop: float, p_full: float
    ) -> None:
        require("onnxruntime")
        require("cv2")
        if max_faces < 1:
            raise ValueError(f"max_faces={max_faces}: a map without faces says nothing, give 1 or more")
        for key, share in (("p_drop", p_drop), ("p_full", p_full)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{key}={share}: is a share of faces, give a number between 0 and 1")
        self.detector = detector
        self.recogniser = recogniser
        self.max_faces = max_faces
        self.p_drop = p_drop
        self.p_full = p_full
        self.deterministic = p_drop in (0.0, 1.0) and p_full in (0.0, 1.0)

    def sample_transform(self) -> SampleTransform:
        """Return what finds faces, once both networks were read.

        Raises:
            ConfigError: a file is not there, or is another network.
        """
        for source, known, wanted in ((self.detector, DETECTOR, OUTPUTS), (self.recogniser, RECOGNISER, 1)):
            found = len(open_session(find_file(source, known), known).get_outputs())
            if found != wanted:
                raise ConfigError(f"{known.key}={source}: is a network of {found} outputs, not of {wanted}. {known}")
        return self._find

    def _find(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
        detector = open_session(find_file(self.detector, DETECTOR), DETECTOR)
        recogniser = open_session(find_file(self.recogniser, RECOGNISER), RECOGNISER)
        found = detect(detector, pixels, max_faces=self.max_faces)
        faces = np.zeros((self.max_faces, WIDTH), dtype=np.float32)
        for place, landmarks in enumerate(found.landmarks):
            faces[place] = recognise(recogniser, pixels, landmarks)
        return {"control_faces": faces, "control_cells": self._cells(found, pixels.shape[:2], generator)}

    def _cells(self, found: Faces, size: tuple[int, int], generator: torch.Generator) -> np.ndarray:
        """Return left, top, right and bottom of each face in places of the map, (max_faces, 4) int32; 0 = no face."""
        cells = np.zeros((self.max_faces, 4), dtype=np.int32)
        for place, box in enumerate(found.boxes):
            dropped, full = between(0, 1, generator) < self.p_drop, between(0, 1, generator) < self.p_full
            if dropped:
                continue
            left, top, right, bottom = np.rint(np.maximum(np.trunc(box) / STRIDE, 0)).astype(int)
            cells[place] = left, top, max(right, left + 1), max(bottom, top + 1)
            if full and len(found) == 1:
                cells[place] = 0, 0, *grid(size)[::-1]
        return cells

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Return what paints faces, (B, 512, H / 32, W / 32); a later face covers those before it."""
        return painted

    def preview(self, control_BCHW: Tensor, image_BCHW: Tensor | None = None) -> Tensor:
        """Return colours of the vectors, over the pictures where they are known."""
        colours_BCHW = super().preview(control_BCHW)
        if image_BCHW is None:
            return colours_BCHW
        size = image_BCHW.shape[-2:]
        is_face_B1HW = F.interpolate((control_BCHW != 0).any(dim=1, keepdim=True).float(), size=size) > 0
        return torch.where(is_face_B1HW, (image_BCHW + F.interpolate(colours_BCHW, size=size)) / 2, image_BCHW)


def grid(size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the map of a picture of `size` (height, width); at least 1."""
    height, width = size
    return max(1, height // STRIDE), max(1, width // STRIDE)


@torch.no_grad()
def painted(image_BCHW: Tensor, made: Mapping[str, Tensor]) -> Tensor:
    """Return maps (B, 512, h, w) of faces (B, F, 512) in their cells (B, F, 4)."""
    height, width = image_BCHW.shape[-2:]
    height, width = grid((height, width))
    down, across = (torch.arange(side, device=image_BCHW.device) for side in (height, width))
    map_BCHW = image_BCHW.new_zeros(len(image_BCHW), WIDTH, height, width)
    for cells_B4, face_BC in zip(made["control_cells"].unbind(1), made["control_faces"].unbind(1), strict=True):
        left_B1, top_B1, right_B1, bottom_B1 = cells_B4[..., None].unbind(1)
        rows, columns = (down >= top_B1) & (down < bottom_B1), (across >= left_B1) & (across < right_B1)
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        map_BCHW = torch.where(inside, face_BC[..., None, None], map_BCHW)
    return map_BCHW
