"""Profiles of averages by power functions, against their definition, integrals on a grid, and numbers of the paper."""

import re

import numpy as np
import pytest

from cascade_train.engine.power_function import decay_at, exponent_of, solve
from cascade_train.options import LONGEST
from tests.style.source import ROOT

LENGTHS = (0.01, 0.05, 0.1, 0.2, 0.28)
GRID = (np.arange(200_000) + 0.5) / 200_000
"""Middles of small parts of a training from 0 to 1."""


def profile(step, length):
    """Return the density at GRID of the average of a length at a time in (0, 1]: t^exponent, scaled to 1."""
    density = np.where(step >= GRID, GRID ** exponent_of(length), 0.0)
    return density / density.mean()


@pytest.mark.parametrize("length", LENGTHS)
def test_an_exponent_gives_a_profile_of_its_length(length):
    density = profile(1.0, length)
    mean = (density * GRID).mean()
    assert np.sqrt((density * (GRID - mean) ** 2).mean()) == pytest.approx(length, rel=1e-4)


def test_exponents_are_those_of_the_paper():
    """Karras et al. 2024, section 3.1: the two averages that EDM2 tracks."""
    assert exponent_of(0.05) == pytest.approx(16.97, abs=0.005)
    assert exponent_of(0.10) == pytest.approx(6.94, abs=0.005)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 6.94, 100.0])
def test_the_length_of_an_exponent_leads_back_to_it(exponent):
    """Equation 123."""
    length = ((exponent + 1) / (exponent + 2) ** 2 / (exponent + 3)) ** 0.5
    assert length <= LONGEST
    assert exponent_of(length) == pytest.approx(exponent, abs=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_decays_give_steps_the_integral_of_the_profile(length):
    """The weight of an update is the integral of t^exponent over the time since the last."""
    steps, exponent = np.arange(1, 201), exponent_of(length)
    decays = [decay_at(exponent, int(step)) for step in steps]
    assert decays[0] == 0.0, "what there was before training is forgotten"
    weights = [(1 - decay) * np.prod(decays[n + 1 :]) for n, decay in enumerate(decays)]
    edges = (np.array([0, *steps]) / steps[-1]) ** (exponent + 1)
    np.testing.assert_allclose(weights, np.diff(edges), atol=1e-12)


@pytest.mark.parametrize("length", [0.03, 0.07, 0.12, 0.2])
def test_coefficients_are_those_of_least_squares_on_a_grid(length):
    kept = [(step, each) for step in (125, 400, 1000) for each in (0.05, 0.1)]
    coefficients, error = solve(kept, 1000, length)
    profiles = np.array([profile(step / 1000, each) for step, each in kept]).T
    wanted = profile(1.0, length)
    fit = np.linalg.lstsq(profiles, wanted, rcond=None)[0]
    np.testing.assert_allclose(coefficients, fit / fit.sum(), atol=1e-3)
    assert sum(coefficients) == pytest.approx(1.0)
    off = np.linalg.norm(profiles @ coefficients - wanted) / np.linalg.norm(wanted)
    assert error == pytest.approx(off, rel=1e-3)


def test_more_kept_averages_come_nearer():
    errors = [solve([(s, e) for s in range(n, 1025, n) for e in (0.05, 0.1)], 1024, 0.2)[1] for n in (512, 128, 64)]
    assert errors[0] > 5 * errors[1] > 5 * errors[2] > 0


def test_the_table_of_the_docs_is_what_is_solved():
    rows = re.findall(r"^\|((?: [\d.]+ \|){8})$", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        count, *errors = map(float, row.strip(" |").split("|"))
        kept = [(step, length) for step in range(1, int(count) + 1) for length in (0.05, 0.1)]
        found = [solve(kept, int(count), length)[1] for length in (0.02, 0.03, 0.07, 0.12, 0.15, 0.2, 0.25)]
        assert [float(f"{error:.2g}") for error in found] == errors


def test_a_kept_average_is_taken_as_it_is():
    kept = [(step, length) for step in (1, 2, 3, 999, 1000) for length in (0.05, 0.1)]
    assert solve(kept, 1000, 0.1) == ([0.0] * 9 + [1.0], 0.0)
