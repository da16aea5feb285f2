"""Noise is drawn sample by sample, has unit variance, and a pyramid repeats the same pattern at every scale."""

import pytest
import torch

from cascade_train.diffusion.noise import Noise, PlainNoise, PyramidNoise
from cascade_train.errors import ConfigError

SHAPE = (4, 32, 48)
OPTIONS = {"levels": 10, "discount": 0.75, "side_range": [1, 16], "interpolation": "nearest", "square_grids": False}


def pyramid(**changed) -> PyramidNoise:
    return PyramidNoise(**(OPTIONS | changed))


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("noise", [PlainNoise(), pyramid(), pyramid(square_grids=True)])
def test_a_sample_depends_on_its_own_generator_alone(noise: Noise) -> None:
    both = noise.draw(generators(3, 8), SHAPE)
    assert both.shape == (2, *SHAPE)
    assert both.dtype == torch.float32
    assert torch.equal(both[1:], noise.draw(generators(8), SHAPE))
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("noise", [PlainNoise(), pyramid(), pyramid(levels=3), pyramid(side_range=None)])
def test_variance_is_one(noise: Noise) -> None:
    drawn = noise.draw(generators(*range(300)), (4, 16, 16))
    assert drawn.var().item() == pytest.approx(1.0, abs=0.05)
    assert drawn.mean().item() == pytest.approx(0.0, abs=0.05)


def test_grids_follow_the_latent_and_not_only_its_height() -> None:
    assert pyramid().grids(32, 48) == [(1, 16, 24), (2, 8, 12), (3, 4, 6), (4, 2, 3), (5, 1, 1)]
    assert pyramid(square_grids=True).grids(32, 48) == [(1, 16, 16), (2, 8, 8), (3, 4, 4), (4, 2, 2), (5, 1, 1)]
    assert [(level, rows, columns) for level, columns, rows in pyramid().grids(48, 32)] == pyramid().grids(32, 48)


def test_the_published_latents_have_five_levels() -> None:
    assert [level for level, _, _ in pyramid().grids(256, 256)] == [4, 5, 6, 7, 8]
    assert pyramid(side_range=[100, 200]).grids(64, 64) == []


def test_coarse_noise_is_shared_by_neighbours() -> None:
    drawn = pyramid().draw(generators(*range(200)), (1, 16, 16))[:, 0]
    plain = PlainNoise().draw(generators(*range(200)), (1, 16, 16))[:, 0]
    near, apart = ((each[:, :, :-1] * each[:, :, 1:]).mean().item() for each in (drawn, plain))
    assert near > 0.2
    assert abs(apart) < 0.02


def test_bilinear_grids_are_smooth() -> None:
    noise = pyramid(interpolation="bilinear", levels=2, side_range=None)
    mixed = noise.mix(torch.zeros(1, 1, 4, 4), [torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])])
    assert mixed[0, 0, 0].diff().ge(0).all()
    assert mixed.unique().numel() == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"levels": 0}, "levels=0 must lie in"),
        ({"discount": 1.5}, "discount=1.5 must lie in"),
        ({"interpolation": "cubic"}, "interpolation=cubic is unknown"),
        ({"side_range": [16, 1]}, "give the smallest and the largest side"),
    ],
)
def test_nonsense_is_refused(changed: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pyramid(**changed)
