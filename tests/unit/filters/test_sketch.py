"""Edges by a network, thick and thin."""

from __future__ import annotations

import cv2
import pytest
import torch
from torch.nn import functional as F

from cascade_train.errors import ConfigError
from cascade_train.filters import sketch as sketch_module
from cascade_train.filters.base import dilate, disc
from cascade_train.filters.sketch import DifferenceConv, EdgeNetwork, SketchFilter
from tests.unit.filters.filter_contract import (
    CPU,
    ControlFilterContract,
    OfFiles,
    both_halves,
    encode,
    generators,
    pictures,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return weights that no one trained, in the published form, whose edges have a wide range."""
    torch.manual_seed(0)
    network = EdgeNetwork().requires_grad_(False)
    found = torch.logit(network(F.interpolate(pictures(2, 64, 96) / 255, size=(32, 32))))
    network.classifier.weight *= 2 / found.std()
    network.classifier.bias.sub_(found.mean()).mul_(2 / found.std())
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    path = tmp_path_factory.mktemp("sketch") / "table5_pidinet.pth"
    torch.save({"state_dict": state}, path)
    return str(path)


def sketch(files: str, **options: object) -> SketchFilter:
    defaults = {"resize": 32, "dilation_kernels": [0, 3, 5, 7, 9], "binarize": True, "threshold": [0.05, 0.7]}
    return SketchFilter(weights=files, **{**defaults, **options})


class TestSketch(OfFiles, ControlFilterContract):
    def make(self) -> SketchFilter:
        return sketch(self.files)


class TestSketchWithoutDraws(OfFiles, ControlFilterContract):
    def make(self) -> SketchFilter:
        return sketch(self.files, dilation_kernels=[3], binarize=False)


def differences(kind: str, weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return sums of weighted differences of pixels, each written out."""
    ring = [(-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1)]

    def pixel(down: int, across: int) -> torch.Tensor:
        return torch.roll(image, (-down, -across), dims=(2, 3))

    total = torch.zeros_like(image)
    for place, (down, across) in enumerate(ring):
        after = ring[(place + 1) % 8]
        minuend, subtrahend = {
            "central": (pixel(down, across), pixel(0, 0)),
            "angular": (pixel(down, across), pixel(*after)),
            "radial": (pixel(2 * down, 2 * across), pixel(down, across)),
        }[kind]
        total += weight[0, 0, down + 1, across + 1] * (minuend - subtrahend)
    return total[:, :, 2:-2, 2:-2]


@pytest.mark.parametrize("kind", ["central", "angular", "radial"])
def test_each_convolution_weighs_differences_of_pixels(kind: str) -> None:
    weight = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    conv = DifferenceConv(1, 1, getattr(sketch_module, kind))
    conv.load_state_dict({"weight": weight})
    image = torch.rand(1, 1, 12, 14, generator=torch.Generator().manual_seed(1))
    expected = differences(kind, weight, image)
    if kind == "radial":  # its weights lie on the ring in the order of rows, the middle's first place left out
        order = [0, 1, 2, 3, 5, 6, 7, 8]
        moved = weight.flatten().clone()
        moved[order] = weight.flatten()[1:]
        expected = differences(kind, moved.view(1, 1, 3, 3), image)
    torch.testing.assert_close(conv(image)[:, :, 2:-2, 2:-2], expected, rtol=1e-4, atol=1e-5)
    flat = torch.full((1, 1, 9, 9), 0.7)
    assert conv(flat)[:, :, 2:-2, 2:-2].abs().max() < 1e-5


def test_the_network_is_the_published_one_by_its_names_and_size() -> None:
    state = EdgeNetwork().state_dict()
    assert sum(value.numel() for value in state.values()) == 710_149
    assert len(state) == 83
    for name in ("block2_1.shortcut.bias", "dilations.3.conv2_4.weight", "conv_reduces.0.conv.bias"):
        assert name in state


@pytest.mark.parametrize("diameter", [3, 5, 7, 9])
def test_a_dilation_is_that_of_a_disc(diameter: int) -> None:
    map_B1HW = torch.rand(2, 1, 20, 31, generator=torch.Generator().manual_seed(diameter))
    expected = [torch.from_numpy(cv2.dilate(each[0].numpy(), disc(diameter))) for each in map_B1HW]
    assert torch.equal(dilate(map_B1HW, diameter)[:, 0], torch.stack(expected))
    assert dilate(map_B1HW, 0) is map_B1HW


def test_lines_have_the_width_and_threshold_of_each_sample(files: str) -> None:
    found = sketch(files, binarize=False, dilation_kernels=[0, 9], resize=None)
    image_BCHW = pictures(1, 32, 40).repeat(2, 1, 1, 1)
    made = {"control_kernel": torch.tensor([0, 1]), "control_threshold": torch.tensor([0.2, 0.6]).view(2, 1, 1, 1)}
    thin, thick = found.build(device=CPU, encode=encode)(image_BCHW / 255, made)
    torch.testing.assert_close(thick[None], dilate(thin[None], 9))
    binary = sketch(files, dilation_kernels=[0, 9], resize=None).build(device=CPU, encode=encode)
    assert torch.equal(binary(image_BCHW / 255, made), torch.stack([thin > 0.2, thick > 0.6]).float())


def test_every_width_and_the_whole_range_of_thresholds_are_drawn(files: str) -> None:
    transform = sketch(files).sample_transform()
    drawn = [transform(pictures(1, 4, 4)[0].numpy(), g) for g in generators(*range(200))]
    assert {int(each["control_kernel"]) for each in drawn} == {0, 1, 2, 3, 4}
    thresholds = [each["control_threshold"].item() for each in drawn]
    assert 0.05 <= min(thresholds) < 0.08
    assert 0.67 < max(thresholds) < 0.7


def test_edges_are_searched_in_a_square_copy_and_brought_back(files: str) -> None:
    image_BCHW = pictures(1, 40, 56)
    found = both_halves(sketch(files, resize=24, binarize=False, dilation_kernels=[0]), image_BCHW, 0)
    small = F.interpolate(image_BCHW / 255, size=(24, 24), mode="bilinear")
    network = EdgeNetwork()
    network.load_state_dict({k.removeprefix("module."): v for k, v in torch.load(files)["state_dict"].items()})
    with torch.no_grad():
        torch.testing.assert_close(found, F.interpolate(network(small), size=(40, 56), mode="bilinear"))


def test_pictures_too_small_for_the_network_are_refused(files: str) -> None:
    with pytest.raises(ConfigError, match=r"resize=null: pictures of \(7, 9\) px are too small to find edges in"):
        both_halves(sketch(files, resize=None), pictures(1, 7, 9), 0)
