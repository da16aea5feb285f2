"""Faces are found, recognised, and painted where they are."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.filters.identity import (
    LANDMARKS,
    Faces,
    IdentityFilter,
    detect,
    paint_faces,
    prominence,
    recognise,
    similarity,
    suppress_overlaps,
)
from cascade_train.filters.parts.requirements import WeightsFile, open_session
from tests.unit.config.defaults import PUBLISHED
from tests.unit.filters import onnx_files
from tests.unit.filters.filter_contract import ControlFilterContract, OfFiles, both_halves, generators

KNOWN = WeightsFile(key="k", what="a network", usual_name="n", licence="none", found="here")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("faces")
    detector, recogniser = onnx_files.detector(folder / "det.onnx"), onnx_files.recogniser(folder / "rec.onnx")
    return {"detector": detector, "recogniser": recogniser}


def identity(files: dict[str, str], **options: object) -> IdentityFilter:
    return IdentityFilter(**{**files, "max_faces": 4, "p_drop": 0.0, "p_full": 0.0, **options})


def crowd(*places: tuple[int, int], side: int = 320) -> Tensor:
    """Return a picture (1, 3, side, side) with a red square of 32 px around each place (x, y) of the coarse grid."""
    image_BCHW = torch.full((1, 3, side, side), 128, dtype=torch.uint8)
    for x, y in places:
        image_BCHW[0, :, y : y + 32, x : x + 32] = torch.tensor([255, 0, 40], dtype=torch.uint8).view(3, 1, 1)
    return image_BCHW


class TestIdentity(OfFiles, ControlFilterContract):
    def make(self) -> IdentityFilter:
        return identity(self.files, p_drop=0.2, p_full=0.3)


def sessions(files: dict[str, str]):
    return [open_session(files[name], KNOWN) for name in ("detector", "recogniser")]


def test_faces_are_found_where_they_are(files: dict[str, str]) -> None:
    detector, _ = sessions(files)
    image = np.ascontiguousarray(crowd((64, 96), (224, 192))[0].numpy().transpose(1, 2, 0))
    found = detect(detector, image, max_faces=4)
    assert found.boxes.tolist() == [[32, 64, 96, 128], [192, 160, 256, 224]]
    assert found.landmarks[0].tolist() == [[48, 80], [80, 80], [64, 96], [48, 112], [80, 112]]


def test_boxes_are_in_pixels_of_a_picture_of_any_size(files: dict[str, str]) -> None:
    detector, _ = sessions(files)
    image = np.zeros((640, 480, 3), dtype=np.uint8)
    image[...] = 128
    image[192:256, 128:192] = (255, 0, 40)
    found = detect(detector, image, max_faces=4)
    assert len(found.boxes) == 1
    np.testing.assert_allclose(found.boxes[0], [64, 128, 192, 256], atol=1)


def test_a_picture_without_faces_has_none(files: dict[str, str]) -> None:
    assert both_halves(identity(files), crowd(), 0).abs().sum() == 0.0


def test_a_face_is_found_from_the_originals_score_on(files: dict[str, str]) -> None:
    """The detector's score is red less green, of 256 (onnx_files.detector)."""
    detector, _ = sessions(files)
    least = PUBLISHED["python"]["filters.identity.SCORE_THRESHOLD"]["value"]
    for red, faces in ((256 * least, 1), (256 * least - 1, 0)):
        image = np.full((320, 320, 3), 64, dtype=np.uint8)
        image[96:128, 96:128] = (64 + red, 64, 64)
        assert len(detect(detector, image, max_faces=4).boxes) == faces


def test_boxes_overlap_by_as_much_as_in_the_original() -> None:
    """Of two squares of 100 pixels the second is moved to the right by a share of what it shares with the first."""
    most = PUBLISHED["python"]["filters.identity.OVERLAP_THRESHOLD"]["value"]
    moved = 100 * (1 - most) / (1 + most)
    for right, kept in ((math.ceil(moved), [0, 1]), (math.floor(moved), [0])):
        boxes = np.array([[0, 0, 99, 99], [right, 0, right + 99, 99]], dtype=np.float32)
        assert suppress_overlaps(boxes).tolist() == kept


def test_of_overlapping_boxes_the_best_stays() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 1, 11, 11], [0, 8, 10, 18], [50, 50, 60, 60]], dtype=np.float32)
    assert suppress_overlaps(boxes).tolist() == [0, 2, 3]
    assert suppress_overlaps(boxes[:0]).tolist() == []


def test_of_too_many_faces_large_ones_near_the_middle_are_taken(files: dict[str, str]) -> None:
    boxes = np.array([[0, 0, 50, 50], [75, 75, 125, 125], [90, 90, 95, 95]], dtype=np.float32)
    assert np.argsort(-prominence(boxes, (200, 200))).tolist() == [1, 2, 0]
    image_BCHW = crowd((32, 32), (160, 160), (256, 256))
    map_BCHW = both_halves(identity(files, max_faces=1), image_BCHW, 0)
    rows, columns = (map_BCHW[0] != 0).any(dim=0).nonzero(as_tuple=True)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 5, 4, 5)


def test_landmarks_are_brought_to_their_places() -> None:
    angle, scale, shift = 0.4, 1.7, np.array([30.0, -12.0])
    turn = scale * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    moved = (LANDMARKS - shift) @ np.linalg.inv(turn).T
    np.testing.assert_allclose(similarity(moved, LANDMARKS), np.concatenate([turn, shift[:, None]], axis=1), atol=1e-9)
    noisy = moved + np.random.default_rng(0).normal(0, 2, moved.shape)
    ours = similarity(noisy, LANDMARKS)
    robust, _ = cv2.estimateAffinePartial2D(noisy, LANDMARKS, method=cv2.RANSAC, ransacReprojThreshold=1e9)

    def squares(m: np.ndarray) -> float:
        return float(((noisy @ m[:, :2].T + m[:, 2] - LANDMARKS) ** 2).sum())

    assert squares(ours) <= squares(robust) + 1e-9


def test_points_are_never_mirrored_and_one_point_is_only_moved() -> None:
    mirrored = LANDMARKS * np.array([-1.0, 1.0])
    assert np.linalg.det(similarity(mirrored, LANDMARKS)[:, :2]) > 0
    same = np.repeat(LANDMARKS[:1], 5, axis=0)
    assert np.isfinite(similarity(same, LANDMARKS)).all()


def test_who_a_face_is_has_length_one_and_depends_on_the_face(files: dict[str, str]) -> None:
    _, recogniser = sessions(files)
    picture = np.full((112, 112, 3), 200, dtype=np.uint8)
    first = recognise(recogniser, picture, LANDMARKS)
    assert first.shape == (512,)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    picture[..., 0] = 10
    assert first @ recognise(recogniser, picture, LANDMARKS) < 0.9


def test_faces_fill_the_places_of_their_boxes_and_the_last_covers_the_others() -> None:
    cells = torch.tensor([[[0, 0, 2, 1], [1, 0, 3, 2], [0, 0, 0, 0]]], dtype=torch.int32)
    faces = torch.arange(1.0, 4.0).view(1, 3, 1).expand(1, 3, 512)
    map_BCHW = paint_faces(torch.zeros(1, 3, 64, 100), {"control_cells": cells, "control_faces": faces})
    assert map_BCHW.shape == (1, 512, 2, 3)
    assert map_BCHW[0, 0].tolist() == [[1, 2, 2], [0, 2, 2]]


def test_boxes_that_leave_the_picture_are_cut_and_small_ones_fill_one_place(files: dict[str, str]) -> None:
    corner = both_halves(identity(files), crowd((0, 0)), 0)
    assert (corner[0, 0] != 0).nonzero().tolist() == [[0, 0]]


def test_a_picture_with_one_face_may_be_filled_by_it(files: dict[str, str]) -> None:
    one, two = crowd((64, 96)), crowd((64, 96), (224, 192))
    full = identity(files, p_full=1.0)
    assert (both_halves(full, one, 0) != 0).any(dim=1).all()
    assert not (both_halves(full, two, 0) != 0).any(dim=1).all()


def test_faces_are_dropped_at_their_rate(files: dict[str, str]) -> None:
    one = Faces(np.array([[32.0, 64.0, 96.0, 128.0]]), np.zeros((1, 5, 2)))
    made = identity(files, p_drop=0.25)
    dropped = [not made._cells(one, (320, 320), g).any() for g in generators(*range(200))]
    assert 0.17 < sum(dropped) / 200 < 0.33
    assert not both_halves(identity(files, p_drop=1.0), crowd((64, 96)), 0).any()


def test_people_see_faces_on_the_picture(files: dict[str, str]) -> None:
    found, image_BCHW = identity(files), crowd((64, 96))
    map_BCHW = both_halves(found, image_BCHW, 0)
    shown = found.preview(map_BCHW, image_BCHW / 255)
    assert torch.equal(shown[..., 200:, :], image_BCHW[..., 200:, :] / 255)
    assert not torch.equal(shown[..., 64:128, 32:96], image_BCHW[..., 64:128, 32:96] / 255)


@pytest.mark.parametrize(("key", "name"), [("detector", "det_10g.onnx"), ("recogniser", "w600k_r50.onnx")])
def test_a_network_that_is_not_there_is_described(files: dict[str, str], key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=no.onnx: no such file.*{name} \(licence: non-commercial"):
        identity(files, **{key: "no.onnx"}).sample_transform()


def test_networks_that_were_swapped_are_refused(files: dict[str, str]) -> None:
    swapped = {"detector": files["recogniser"], "recogniser": files["detector"]}
    with pytest.raises(ConfigError, match=r"rec.onnx: is a network of 1 outputs, not of 9\. It is the face detector"):
        identity(swapped).sample_transform()
