"""How pictures of docs/tutorial.md are compared and shown; what the trainings took, the bench itself measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.tiny_stable_diffusion import FAMILIES
from bench.tutorial import (
    Pictures,
    retrieval_line,
)


@pytest.fixture
def truth() -> Pictures:
    """Twenty pictures of noise."""
    pictures = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    return Pictures(captions=tuple(f"noise {n}" for n in range(20)), images_NHW3=pictures)


def test_true_pictures_are_found_and_others_are_not(truth: Pictures) -> None:
    asked = truth.captions[:4]
    assert retrieval_line("x", truth.of(asked), truth, asked) == "| x | 4 | 100 | 100 | 5.0, 25.0 |"
    wrong = truth.images_NHW3[4:8]
    assert retrieval_line("x", wrong, truth, asked).startswith("| x | 4 | 0 |")


@pytest.mark.parametrize(
    ("page", "results", "rows"),
    [("tutorial", "tutorial", 13), ("stable-diffusion", "tiny_stable_diffusion", 3 + 2 + len(FAMILIES))],
)
def test_numbers_of_a_page_are_those_that_were_measured(repository: Path, page: str, results: str, rows: int) -> None:
    measured = (repository / f"bench/results/{results}.md").read_text().splitlines()
    parts = (repository / f"docs/{page}.md").read_text().split("<!-- measured -->")[1:]
    shown = [row for part in parts for row in part.split("<!-- end -->")[0].splitlines() if row]
    assert len(shown) >= rows
    assert [row for row in shown if row not in measured] == []
