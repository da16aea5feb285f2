"""How pictures of docs/tutorial.md are compared and shown; what the trainings took, the bench itself measures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.tiny_stable_diffusion import FAMILIES
from bench.tutorial import (
    CELL_PX,
    LABEL_PX,
    Pictures,
    distances,
    read_pictures,
    retrieval_line,
    rows_of,
    sheet,
    validated,
)


@pytest.fixture
def truth() -> Pictures:
    """Twenty pictures of noise."""
    pictures = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    return Pictures(captions=tuple(f"noise {n}" for n in range(20)), images_NHW3=pictures)


def test_distances_are_mean_squares(truth: Pictures) -> None:
    images = truth.images_NHW3
    found = distances(images[:2], images)
    assert found.shape == (2, 20)
    assert found[1, 1] == pytest.approx(0, abs=1e-5)
    expected = ((images[0] / 255 - images[3] / 255) ** 2).mean()
    assert found[0, 3] == pytest.approx(expected, rel=1e-3)


def test_true_pictures_are_found_and_others_are_not(truth: Pictures) -> None:
    asked = truth.captions[:4]
    assert retrieval_line("x", truth.of(asked), truth, asked) == "| x | 4 | 100 | 100 | 5.0, 25.0 |"
    wrong = truth.images_NHW3[4:8]
    assert retrieval_line("x", wrong, truth, asked).startswith("| x | 4 | 0 |")


def test_pictures_are_read_with_their_captions_and_shown_in_columns(tmp_path: Path) -> None:
    for name, colour in (("b", "red"), ("a", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"{colour}\n")
    read = read_pictures(tmp_path, 16)
    assert read.captions == ("blue", "red")
    shown = sheet(["red", "blue"], {"drawn": read.of(["red", "blue"])})
    assert shown.getpixel((LABEL_PX + 10, 60)) == (255, 0, 0)
    assert shown.getpixel((LABEL_PX + CELL_PX + 10, 60)) == (0, 0, 255)


def test_what_was_held_out_at_the_beginning_half_way_and_at_the_end(tmp_path: Path) -> None:
    rows = [{"step": step, "validate/loss": loss} for step, loss in ((1, 0.5), (2, 0.2), (3, 0.3))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validated("c", rows_of(tmp_path)) == "0.50, 0.20, 0.30 loss"
    assert validated("b", rows) == ""


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
