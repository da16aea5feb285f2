"""The tiny cascade in the package paints what its captions say, as the judge reads its pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.shapes_judge import accuracies
from bench.tiny_cascade import Truth, from_captions, painted, shapes, unseen
from cascade_train.config.plain import to_plain
from cascade_train.generate import GenerateArgs, generate
from cascade_train.trained_model import find_model


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Scenes that were in nobody's training pictures."""
    found = [find_model("package:tiny", key="from", part=part).cfg for part in ("prior", "decoder")]
    return unseen([shapes(to_plain(cfg.data), cfg.model.image_size) for cfg in found], 32)


def test_previews_show_what_captions_say(truth: Truth, tmp_path: Path) -> None:
    assert generate(GenerateArgs(source="package:tiny", prompts=truth.captions, batch_size=32, out=str(tmp_path))) == 0
    right = accuracies([picture / 255 for picture in painted(tmp_path, 32)], truth.scenes)
    assert min(right[name] for name in ("colour", "size", "position", "background")) > 0.9
    assert right["shape"] > 0.75


def test_stage_b_and_a_show_colours_and_places(truth: Truth, tmp_path: Path) -> None:
    pictures = from_captions("package:tiny", "package:tiny", truth, 0, tmp_path)
    right = accuracies([picture / 255 for picture in pictures], truth.scenes)
    assert min(right[name] for name in ("position", "background")) > 0.9
    assert min(right[name] for name in ("colour", "size")) > 0.75
