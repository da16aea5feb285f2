"""What the page about the tiny Stable Diffusions says was measured."""

from __future__ import annotations

from pathlib import Path

from bench.tiny_stable_diffusion import FAMILIES


def test_numbers_of_the_page_are_those_that_were_measured(repository: Path) -> None:
    measured = (repository / "bench/results/tiny_stable_diffusion.md").read_text().splitlines()
    page = (repository / "docs/stable-diffusion.md").read_text()
    shown = page.split("<!-- measured -->")[1].split("<!-- end -->")[0].strip().splitlines()
    assert len(shown) == 3 + 2 + len(FAMILIES), "heads, targets, the judge, the autoencoder, and a row of each family"
    assert [row for row in shown if row not in measured] == []
