"""The recipes of the tiny cascade in a few steps: a compressor that trained with Stage B serves Stage C and both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from bench.tiny_cascade import main as judge_cascade
from cascade_train.generate import GenerateArgs, generate
from cascade_train.models.convolutional import ConvolutionalCompressor
from tests.distributed.test_modes import B_NARROW, NARROW
from tests.integration.runs import cut_back, read_metrics, train

FEW = ("train.max_steps=2", "train.global_batch_size=4", "sample.every_steps=null", "validate.every_steps=null")


def small(overrides: tuple[str, ...]) -> list[str]:
    """Return those that make a network small, but for the size of pictures."""
    return [each for each in overrides if each.startswith(("model.network", "model.text_encoder"))]


RECIPE = (
    "experiment=tiny_b",
    "model=b_tiny_vqgan",
    *small(B_NARROW),
    *FEW,
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=null",
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stage B with its compressor, after two steps of its recipe."""
    folder = tmp_path_factory.mktemp("tiny") / "b"
    return train(folder, *RECIPE)


@pytest.fixture(scope="module")
def prior(decoder: Path) -> Path:
    """A Stage C on the latents of that compressor."""
    weights = f"model.semantic_compressor.weights={decoder}"
    return train(decoder.with_name("c"), "experiment=tiny_c", *small(NARROW), *FEW, weights)


def test_the_compressor_has_moved_and_lies_in_the_export(decoder: Path) -> None:
    fresh = ConvolutionalCompressor(weights=None)
    fresh.build(device=torch.device("cpu"))
    stored = load_file(decoder / "export" / "semantic_compressor" / "model.safetensors")
    assert stored.keys() == fresh.module.state_dict().keys()
    assert not any(torch.equal(stored[name], value) for name, value in fresh.module.named_parameters())
    assert all(np.isfinite(row["loss"]) for row in read_metrics(decoder))


def test_a_stopped_run_goes_on_with_the_compressor_it_had(decoder: Path, tmp_path: Path) -> None:
    again = train(cut_back(decoder, tmp_path / "b", 1), *RECIPE)
    assert read_metrics(again)[-1] == read_metrics(decoder)[-1]
    for part in ("decoder/decoder/diffusion_pytorch_model", "semantic_compressor/model"):
        expected, found = (load_file(run / "export" / f"{part}.safetensors") for run in (decoder, again))
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_stage_c_and_b_paint_together(prior: Path, decoder: Path, tmp_path: Path) -> None:
    generate(
        GenerateArgs(source=str(prior), decoder=str(decoder), prompts=["a red circle"], steps=2, out=str(tmp_path))
    )
    with Image.open(tmp_path / "00_00.png") as picture:
        assert picture.size == (96, 96)


def test_the_judge_finds_that_two_steps_teach_nothing(
    prior: Path, decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert judge_cascade(["--prior", str(prior), "--decoder", str(decoder), "--count", "4", "--out", str(page)]) == 1
    assert page.read_text() in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert "| the judge on true pictures | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |" in lines
    with Image.open(page.with_suffix(".png")) as grid:
        assert grid.size[0] > 3 * 96
