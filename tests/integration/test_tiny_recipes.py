"""The recipes of the tiny models in a few steps: what they train first serves what they train then, and all paint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from bench.tiny_cascade import main as judge_cascade
from bench.tiny_stable_diffusion import main as judge_stable_diffusion
from cascade_train.__main__ import launch
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor, ConvolutionalPreviewer
from tests.distributed.test_modes import B_NARROW, NARROW
from tests.integration.runs import cut_back, read_metrics, train

DATA = "data.samples=300"
FEW = ("train.max_steps=2", "train.global_batch_size=4", "sample.every_steps=null", "validate.every_steps=null")


def small(overrides: tuple[str, ...]) -> list[str]:
    """Return those that make a network small, but for the size of pictures."""
    return [each for each in overrides if each.startswith(("model.network", "model.text_encoder"))]


def of_parts(**folders: Path) -> list[str]:
    """Return where parts of the model come from."""
    return [f"model.{part}.weights={folder}" for part, folder in folders.items()]


RECIPE = ("experiment=tiny_compressor", *FEW, DATA, "checkpoint.every_steps=1", "checkpoint.keep_last=null")


@pytest.fixture(scope="module")
def compressor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressor and its previewer after two steps of their recipe."""
    return train(tmp_path_factory.mktemp("tiny") / "compressor", *RECIPE)


@pytest.fixture(scope="module")
def decoder(compressor: Path) -> Path:
    """A Stage B on that compressor, from latents that were made before."""
    chosen = ("experiment=tiny_b", "model=b_tiny", *small(B_NARROW), *FEW, *of_parts(semantic_compressor=compressor))
    latents = compressor.with_name("latents")
    assert launch(["cache", *chosen, DATA, f"out={latents}"]) == 0
    cached = ("data=cached", f"data.path={latents}", "data.num_workers=0", "~data.samples", "~data.background_weight")
    return train(compressor.with_name("b"), *chosen, *cached, "validate.reconstructions=0")


@pytest.fixture(scope="module")
def prior(compressor: Path) -> Path:
    """A Stage C on it."""
    parts = of_parts(semantic_compressor=compressor, previewer=compressor)
    return train(compressor.with_name("c"), "experiment=tiny_c", *small(NARROW), *FEW, DATA, *parts)


@pytest.mark.parametrize(
    ("part", "kind"), [("semantic_compressor", ConvolutionalCompressor), ("previewer", ConvolutionalPreviewer)]
)
def test_both_halves_of_the_autoencoder_have_moved_and_lie_in_the_export(
    compressor: Path, part: str, kind: Any
) -> None:
    fresh = kind(weights=None)
    fresh.build(device=torch.device("cpu"))
    stored = load_file(compressor / "export" / part / "model.safetensors")
    assert stored.keys() == fresh.module.state_dict().keys()
    assert not any(torch.equal(stored[name], value) for name, value in fresh.module.named_parameters())
    assert all(np.isfinite(row["loss"]) for row in read_metrics(compressor))


def test_a_stopped_run_goes_on_with_the_compressor_it_had(compressor: Path, tmp_path: Path) -> None:
    again = train(cut_back(compressor, tmp_path / "compressor", 1), *RECIPE)
    assert read_metrics(again)[-1] == read_metrics(compressor)[-1]
    for part in ("previewer", "semantic_compressor"):
        expected, found = (load_file(run / "export" / part / "model.safetensors") for run in (compressor, again))
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_stage_c_and_b_paint_together(prior: Path, decoder: Path, tmp_path: Path) -> None:
    generate(
        GenerateArgs(source=str(prior), decoder=str(decoder), prompts=["a red circle"], steps=2, out=str(tmp_path))
    )
    with Image.open(tmp_path / "00_00.png") as picture:
        assert picture.size == (96, 96)


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of an autoencoder after two steps of its recipe, which lies beside them."""
    vae = train(tmp_path_factory.mktemp("tiny_sd") / "vae", "experiment=tiny_vae", "model=vae_tiny", *FEW, DATA)
    made = vae.with_name("latents")
    chosen = ("experiment=tiny_sd", f"model.vae.weights={vae}", DATA)
    assert launch(["cache", *chosen, "captions=false", f"out={made}"]) == 0
    return made


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def network(request: pytest.FixtureRequest, latents: Path) -> tuple[str, Path]:
    """A family, and a network of it that trained for two steps on these latents."""
    model, vae = f"model={request.param}_tiny", latents.with_name("vae")
    cached = ("data=cached", f"data.path={latents}", "data.num_workers=0", "~data.samples", "~data.only")
    chosen = (f"experiment=tiny_{request.param}", model, f"model.vae.weights={vae}", "~data.background_weight", *FEW)
    return request.param, train(latents.with_name(request.param), *chosen, *cached)


@pytest.mark.slow
def test_a_text_tower_trains_from_nothing_with_its_network(network: tuple[str, Path]) -> None:
    family, run = network
    for tower in ("text_encoder", "text_encoder_2") if family == "sdxl" else ("text_encoder",):
        stored = load_file(run / "export" / "pipeline" / tower / "model.safetensors")
        assert any(value.std() > 0 for value in stored.values())
    assert all(np.isfinite(row["loss"]) for row in read_metrics(run))


@pytest.mark.slow
def test_the_judge_of_stable_diffusion_writes_its_page(
    network: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, (_, run) = tmp_path / "page.md", network
    assert judge_stable_diffusion(["--sd", str(run), "--sdxl", str(run), "--count", "4", "--out", str(page)]) == 1
    assert page.read_text() in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert "| the judge on true pictures | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |" in lines
    with Image.open(page.with_suffix(".png")) as grid:
        assert grid.size[0] > 4 * 32
