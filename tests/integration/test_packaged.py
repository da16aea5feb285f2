"""The tiny models in the package paint what their captions say, as the judge reads their pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.shapes_judge import ATTRIBUTES, accuracies
from bench.tiny_cascade import Truth, decibels, from_captions, from_pictures, painted, trained_on, unseen
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from cascade_train.results.find import find_model
from tests.integration.runs import read_metrics, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Scenes that were in nobody's training pictures."""
    found = [find_model("package:tiny", key="from", part=part).cfg for part in ("prior", "decoder")]
    return unseen([trained_on(cfg) for cfg in found], 32)


def test_previews_show_what_captions_say(truth: Truth, tmp_path: Path) -> None:
    assert generate(GenerateArgs(source="package:tiny", prompts=truth.captions, batch_size=32, out=str(tmp_path))) == 0
    right = accuracies([picture / 255 for picture in painted(tmp_path, 32)], truth.scenes)
    assert min(right[name] for name in ATTRIBUTES) > 0.9


def test_the_whole_cascade_paints_what_captions_say(truth: Truth, tmp_path: Path) -> None:
    pictures = from_captions("package:tiny", "package:tiny", truth.captions, 0, tmp_path)
    right = accuracies([picture / 255 for picture in pictures], truth.scenes)
    assert min(right[name] for name in ATTRIBUTES) > 0.9


def test_stage_b_and_a_reconstruct_pictures_from_their_semantic_latents(truth: Truth, tmp_path: Path) -> None:
    pictures = from_pictures("package:tiny/decoder", truth, 0, tmp_path)
    found, bilinear = decibels(pictures, truth, ConvolutionalCompressor.stride)
    assert found > bilinear + 9


def test_stage_b_reads_its_noised_latents_too(tmp_path: Path) -> None:
    """At little noise they add to what the semantic latents tell."""
    settings = ("train.max_steps=1", "optimizer.lr=1e-9", "validate.every_steps=1")
    held_out = ("validate.share=0.1", "validate.samples=64")
    pictures = ("data.background_weight=0.1", "data.seed=1", "data.samples=640")
    folder = train(tmp_path / "run", "model=b_tiny", "task=reconstruction", *settings, *held_out, *pictures)
    measured = read_metrics(folder)[-1]
    assert measured["validate/loss_logsnr_6"] < 0.9 * measured["validate/loss_logsnr_-6"]


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_stable_diffusion_paints_what_captions_say(family: str, tmp_path: Path) -> None:
    source = f"package:tiny/{family}"
    truth = unseen([trained_on(find_model(source, key="from", part=None).cfg)], 32)
    pictures = from_captions(source, None, truth.captions, 0, tmp_path)
    right = accuracies([picture / 255 for picture in pictures], truth.scenes)
    assert min(right[name] for name in ("colour", "size", "position", "background")) > 0.85
    assert right["shape"] > 0.7
