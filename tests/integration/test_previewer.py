"""A previewer through the real entry point: trains without a network, is measured and shown, and Stage C takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.commands.evaluate import EvaluateArgs, evaluate
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_source import find_weight_files
from tests.distributed.test_modes import NARROW
from tests.integration.runs import SMALL, read_metrics, train

pytestmark = pytest.mark.slow

ORIGINAL = "model.previewer._target_=cascade_train.models.cascade.previewer.ConvolutionPreviewer"
SCRATCH = "model.previewer.weights=null"
PREVIEW = (
    *("model=c_tiny", "task=reconstruction", "objective=preview", "model.image_size=64", "optimizer.lr=3e-3"),
    *("train.global_batch_size=4", "ema.decay=0.9", "validate.share=0.05", "validate.samples=94"),
)
ABSENT = ("model.weights=nobody/nothing", "model.text_encoder.weights=nobody/nothing")
"""What is not there, and need not be."""

WEIGHTS = Path("export", "previewer", "model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that looks at itself at its beginning, in its middle and at its end."""
    looks = ("sample.every_steps=40", "sample.count=2", "validate.every_steps=20", "checkpoint.every_steps=null")
    folder = tmp_path_factory.mktemp("previewer") / "run"
    return train(folder, *PREVIEW, SCRATCH, *ABSENT, *looks, "train.max_steps=40", "log.every_steps=40")


def test_previews_come_nearer_to_their_pictures(run: Path) -> None:
    rows = read_metrics(run)
    assert all({"loss", "loss_raw", "grad_norm", "lr"} <= row.keys() for row in rows)
    measured = [row for row in rows if "validate/psnr" in row]
    assert [row["step"] for row in measured] == [20, 40]
    assert {f"{n}/{each}" for n in ("validate", "validate_ema") for each in ("loss", "psnr", "ssim")} <= rows[-1].keys()
    assert measured[1]["validate/psnr"] > measured[0]["validate/psnr"] + 0.5
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]


def test_the_grid_shows_originals_and_previews(run: Path) -> None:
    pictures = {path.name for path in (run / "samples" / "step_40").iterdir()}
    assert pictures == {"grid.png", *(f"0{i}_{kind}preview.png" for i in (0, 1) for kind in ("", "ema_"))}
    with Image.open(run / "samples" / "step_40" / "00_preview.png") as picture:
        assert picture.size == (64, 64)


def test_an_evaluation_measures_what_was_trained(run: Path, tmp_path: Path) -> None:
    assert evaluate(EvaluateArgs(source=str(run), out=str(tmp_path), track=False)) == 0
    found = json.loads((tmp_path / "metrics.json").read_text())["measures"]
    assert found["psnr"] == pytest.approx(read_metrics(run)[-1]["validate_ema/psnr"], abs=0.01)


def test_a_previewer_trains_on_and_stage_c_shows_its_samples_by_it(run: Path, tmp_path: Path) -> None:
    trained, short = load_file(run / WEIGHTS), ("train.max_steps=1", "train.global_batch_size=2")
    taken = (f"model.previewer.weights={run}", *short)
    again = load_file(train(tmp_path / "a", *PREVIEW, *taken, "optimizer.lr=1e-9", "ema.decay=null") / WEIGHTS)
    assert all(torch.allclose(value, again[name], rtol=0, atol=1e-6) for name, value in trained.items())
    looks = ("sample.every_steps=1", "sample.count=1", "sample.steps=1")
    stage_c = train(tmp_path / "c", "task=finetune", *NARROW, *taken, *looks)
    with Image.open(stage_c / "samples" / "step_1" / "00_sample.png") as picture:
        assert picture.size == (64, 64)


def test_the_originals_previewer_trains_in_bf16_from_fp32_weights(tmp_path: Path) -> None:
    short = ("train.max_steps=1", "train.global_batch_size=1", "sample.count=1", "validate.samples=1", "ema.decay=null")
    looks = ("train.precision=bf16", "sample.every_steps=1", "validate.every_steps=1", "checkpoint.every_steps=null")
    folder = train(tmp_path / "run", *PREVIEW, ORIGINAL, SCRATCH, *short, *looks)
    with Image.open(folder / "samples" / "step_1" / "00_preview.png") as picture:
        assert picture.size == (16, 16), "eight pixels for each of 2 x 2 positions"
    stored = load_file(folder / WEIGHTS)
    assert {value.dtype for name, value in stored.items() if not name.endswith("num_batches_tracked")} == {
        torch.float32
    }
    assert read_metrics(folder)[-1]["validate/loss"] > 0


def test_verbs_that_need_a_stage_that_paints_refuse_it(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pictures of stage_c's latents, and samples nothing from prompts"):
        generate(GenerateArgs(source=str(run), prompts=["a circle"], out=str(tmp_path)))
    with pytest.raises(ConfigError, match="samples nothing from prompts"):
        generate(GenerateArgs(source=str(run), decoder=str(run), prompts=["a circle"], out=str(tmp_path)))
    with pytest.raises(ConfigError, match="this run has left no export/prior, only previewer$"):
        find_weight_files(str(run), part="prior")


def test_its_checkpoint_is_exported_again_in_the_one_format_there_is(run: Path, tmp_path: Path) -> None:
    assert export(ExportArgs(source=str(run), out=str(tmp_path / "again"))) == 0
    first, second = load_file(run / WEIGHTS), load_file(tmp_path / "again" / "previewer" / "model.safetensors")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    with pytest.raises(ConfigError, match="whose export/ holds every format"):
        export(ExportArgs(source=str(run), format="original", out=str(tmp_path / "other")))


def test_a_cache_is_neither_made_nor_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ("data=shapes", "data.samples=4", "data.image_size=64")
    folder = tmp_path / "cache"
    preview = (*PREVIEW, SCRATCH)
    assert launch(["cache", *preview, *data, f"out={folder}"]) == 2
    assert "trains on pictures, so that nothing can be cached for it" in capfd.readouterr().err
    assert launch(["cache", "model=c_tiny", "task=finetune", "model.image_size=64", *data, f"out={folder}"]) == 0
    cached = ("data=cached", f"data.path={folder}", "validate.share=null", f"run.dir={tmp_path / 'run'}")
    assert launch([*SMALL, *preview, *cached]) == 2
    assert "is a cache, which has none: use the data that it was made of" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("activation_checkpointing=true",), "recomputes the network, and here none trains"),
        (("validate.every_steps=1", "validate.reconstructions=2"), "not for this stage_c"),
        (("ema.weights=nobody/nothing",), "the average of a Previewing starts from the weights"),
    ],
)
def test_what_would_do_nothing_is_refused_and_leaves_nothing(
    given: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch([*SMALL, *PREVIEW, *given, f"run.dir={tmp_path / 'run'}"]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "run").exists()
