"""Detail is taken away, and the rest stays where it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.filters.super_resolution import LatentSuperResolutionFilter, SuperResolutionFilter
from tests.unit.filters.filter_contract import CPU, ControlFilterContract, both_halves, encode, pictures


class TestSuperResolution(ControlFilterContract):
    def make(self) -> SuperResolutionFilter:
        return SuperResolutionFilter(scale_factor=0.25)


class TestLatentSuperResolution(ControlFilterContract):
    def make(self) -> LatentSuperResolutionFilter:
        return LatentSuperResolutionFilter(scale_factor=0.5)


def test_each_block_of_pixels_shows_its_first() -> None:
    image_BCHW = pictures(1, 8, 12)
    coarse_BCHW = both_halves(SuperResolutionFilter(scale_factor=0.25), image_BCHW, 0)
    expected = image_BCHW[:, :, ::4, ::4].float() / 255
    assert torch.equal(coarse_BCHW, expected.repeat_interleave(4, 2).repeat_interleave(4, 3))


def test_a_picture_keeps_its_size_where_it_does_not_divide() -> None:
    assert both_halves(SuperResolutionFilter(scale_factor=0.25), pictures(1, 50, 70), 0).shape[-2:] == (50, 70)


def test_a_share_of_one_keeps_everything() -> None:
    image_BCHW = pictures(1, 5, 7)
    assert torch.equal(both_halves(SuperResolutionFilter(scale_factor=1.0), image_BCHW, 0), image_BCHW / 255)


def test_latents_are_those_of_the_smaller_copy_repeated() -> None:
    image_BCHW = pictures(1, 96, 160)
    latent_BCHW = both_halves(LatentSuperResolutionFilter(scale_factor=0.5), image_BCHW, 0)
    small_BCHW = image_BCHW[:, :, ::2, ::2].float() / 255
    assert latent_BCHW.shape == (1, 16, 4, 6)
    assert torch.equal(latent_BCHW, encode(small_BCHW).repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_people_see_the_coarse_picture_where_it_is_known() -> None:
    found = LatentSuperResolutionFilter(scale_factor=0.5)
    image_BCHW = pictures(1, 64, 64) / 255
    latent_BCHW = torch.zeros(1, 16, 4, 4)
    assert torch.equal(found.preview(latent_BCHW, image_BCHW)[..., ::2, ::2], image_BCHW[..., ::2, ::2])
    assert found.preview(latent_BCHW).shape == (1, 3, 4, 4)


def test_an_encoder_that_refuses_the_smaller_copy_is_named() -> None:
    def refuse(image_BCHW: Tensor) -> Tensor:
        raise ValueError(f"image of {tuple(image_BCHW.shape[-2:])} pixels")

    map_of = LatentSuperResolutionFilter(scale_factor=0.5).build(device=CPU, encode=refuse)
    with pytest.raises(ConfigError, match=r"0.5: the stage cannot encode the smaller copy \(image of \(48, 48\) pix"):
        map_of(torch.zeros(1, 3, 96, 96), {})


def test_latents_of_another_stage_are_refused() -> None:
    map_of = LatentSuperResolutionFilter(scale_factor=0.5).build(device=CPU, encode=torch.nn.AvgPool2d(4))
    with pytest.raises(ConfigError, match="is for latents of 16 channels, this stage's have 3; use it with a model of"):
        map_of(torch.zeros(1, 3, 96, 96), {})
