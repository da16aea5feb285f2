"""What commit a18770c left: its runs, caches, exports, sweeps and evaluations go on and are read as by itself.

What is frozen, and how it was made: tests/frozen/README.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from cascade_train.__main__ import launch
from cascade_train.config.saved import load_saved_config
from cascade_train.config.targets import import_target
from tests.frozen import frozen_set
from tests.frozen.frozen_set import COMMIT, HERE, STEP, assert_went_on, reads_checkpoints, stopped
from tests.integration.runs import tensor_digests

pytestmark = pytest.mark.slow

RUNS = (
    *("a_vqgan", "autoencoder_kl", "b_reconstruction", "c_cached", "c_controlnet", "c_finetune", "c_lora"),
    *("c_plain_lora", "c_stream", "pair", "previewer", "sd_controlnet", "sd_finetune", "sd_lora", "sdxl_controlnet"),
    *("sdxl_finetune", "sdxl_lora"),
)
EXPORTED = tuple(name for name in RUNS if name not in ("c_cached", "c_stream"))
TARGETS = (HERE / f"{COMMIT}_targets.txt").read_text().split()
SEEDED = {
    **dict.fromkeys(("c_finetune", "pair"), "text_encoder/"),
    "sdxl_finetune": r"text_(encoder/|model\.).*layers\.1\.",
}
"""Of a run's export, tensors that come from its seed and from no file: CPUs round them differently."""
WITHOUT = {"b_reconstruction": r"/(text_encoder|vqgan)/"}
"""Of a run's export, files that are no longer written: no pipeline of diffusers samples its objective."""
TOLERANCE, OF_BF16 = 1e-4, 1e-2
"""Other CPUs (SSE 4.1, AVX2) move metrics by 3e-5 at most, where the network computes in bf16 by 3e-3."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return frozen_set.unpack(tmp_path_factory.mktemp("frozen"))


@pytest.fixture
def frozen(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the commands that made the set; a copy of it is the current folder."""
    commands = frozen_set.copy_as_if_made_there(unpacked, tmp_path / "set")
    monkeypatch.chdir(tmp_path / "set")
    frozen_set.use_its_weights(monkeypatch, tmp_path / "weights")
    return commands


def test_everything_in_the_set_is_tried(frozen: dict[str, Any]) -> None:
    assert sorted(RUNS) == sorted(frozen["runs"]) == sorted(str(path.parent) for path in Path().glob("*/checkpoints"))
    assert sorted(EXPORTED) == sorted(frozen["exports"])
    assert len(TARGETS) >= 80


@reads_checkpoints
@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_as_it_would_have(frozen: dict[str, Any], name: str) -> None:
    expected = stopped(Path(name))
    assert launch(frozen["runs"][name]) == 0
    assert_went_on(Path(name), expected, OF_BF16 if name == "c_plain_lora" else TOLERANCE)


@reads_checkpoints
@pytest.mark.parametrize("name", EXPORTED)
def test_a_checkpoint_is_exported_to_the_same_tensors(frozen: dict[str, Any], name: str) -> None:
    written = frozen["exports"][name]
    assert launch(["export", f"from={name}", f"step={STEP}", f"format={written['format']}", "out=again"]) == 0
    assert written["tensors"]
    kept = {file: each for file, each in written["tensors"].items() if not re.search(WITHOUT.get(name, "^$"), file)}
    assert (name in WITHOUT) == (kept != written["tensors"])
    assert stored(name, tensor_digests(Path("again"))) == stored(name, kept)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("frozen")
def test_a_saved_configuration_still_loads(name: str) -> None:
    saved = yaml.safe_load(Path(name, "config.yaml").read_text())
    loaded = load_saved_config(Path(name))
    for room in ("train", "ema", "run"):
        same = saved[room].keys() - {"allow_any_target"}
        assert {key: loaded[room][key] for key in same} == {key: saved[room][key] for key in same}


@pytest.mark.parametrize("target", TARGETS)
def test_a_class_is_still_found_by_the_name_that_was_saved(target: str) -> None:
    assert callable(import_target(target))


def test_a_cache_is_found_complete(frozen: dict[str, Any]) -> None:
    kept = {path: path.read_bytes() for path in Path("cache").iterdir()}
    assert len(kept) >= 6
    assert launch(frozen["cache"]) == 0
    assert {path: path.read_bytes() for path in Path("cache").iterdir()} == kept


@reads_checkpoints
def test_a_sweep_is_shown_and_its_best_run_exported(frozen: dict[str, Any]) -> None:
    results = lines("multirun/rates/results.jsonl")
    assert launch(["report", "multirun/rates", "out=page.html", "promote=best"]) == 0
    page = data_of("page.html")
    assert page["facts"]["best run"] == "multirun/rates/lr=0.001"
    assert page["sweep"]["keys"] == ["optimizer.lr"]
    assert [row["run"] for row in page["sweep"]["rows"]] == ["lr=0.001", "lr=0.01"]
    assert [row["metric"] for row in page["sweep"]["rows"]] == [row["values"]["loss"] for row in results]
    assert tensor_digests(Path("best")) == frozen["best"]


def test_a_sweep_is_found_finished(frozen: dict[str, Any]) -> None:
    kept = {path: path.read_bytes() for path in Path("multirun").rglob("metrics.jsonl")}
    results = lines("multirun/rates/results.jsonl")
    assert len(kept) == len(results) == 2
    assert launch(frozen["sweep"]) == 0
    assert lines("multirun/rates/results.jsonl") == results
    assert {path: path.read_bytes() for path in Path("multirun").rglob("metrics.jsonl")} == kept


@pytest.mark.usefixtures("frozen")
def test_a_run_is_shown_with_its_curves() -> None:
    assert launch(["report", "c_finetune", "out=page.html"]) == 0
    curves = data_of("page.html")["runs"][0]["series"]
    rows = lines("c_finetune/metrics.jsonl")
    for key in ("loss", "grad_norm", "validate/loss", "validate_ema/c/loss"):
        assert curves[key]["y"] == [row[key] for row in rows if key in row]


@reads_checkpoints
@pytest.mark.parametrize("lost", [0, 2])
def test_an_evaluation_goes_on_with_the_pictures_that_are_there(frozen: dict[str, Any], lost: int) -> None:
    folder = Path("c_finetune", "evaluation", f"step_{STEP}")
    measures = json.loads((folder / "metrics.json").read_text())["measures"]
    pictures = sorted((folder / "pictures").glob("*.png"))
    assert len(pictures) == 4
    before = [(np.array(Image.open(path)).astype(int), path.stat().st_mtime_ns) for path in pictures]
    for path in (*pictures[:lost], folder / "metrics.json"):
        path.unlink()
    assert launch(frozen["evaluation"]) == 0
    for number, (path, (pixels, time)) in enumerate(zip(pictures, before, strict=True)):
        assert (path.stat().st_mtime_ns == time) == (number >= lost)
        assert np.abs(np.array(Image.open(path)) - pixels).max() <= 1
    again = json.loads((folder / "metrics.json").read_text())["measures"]
    assert again == pytest.approx(measures, rel=1e-2)


@pytest.mark.usefixtures("frozen")
def test_checkpoints_are_listed_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["checkpoints", "ls", "c_finetune"]) == 0
    assert re.search(rf"^ *{STEP} .*; named kept$", capsys.readouterr().out, re.MULTILINE)
    for name in RUNS:
        assert launch(["checkpoints", "verify", name]) == 0
    part = next(Path("pair", "checkpoints", f"step_{STEP}").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    assert launch(["checkpoints", "verify", "pair"]) == 1


def stored(name: str, digests: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return digests by file and tensor; of those that no checkpoint holds, dtype and shape alone.

    Text towers had the names of transformers 5.6 then, and have those of published folders now.
    """
    flat = {
        f"{file} {tensor.removeprefix('text_model.')}": digest
        for file, tensors in digests.items()
        for tensor, digest in tensors.items()
    }
    seeded = {key for key in flat if name in SEEDED and re.search(SEEDED[name], key)}
    assert (name in SEEDED) == bool(seeded)
    assert len(seeded) < len(flat)
    return {key: digest.rpartition(" ")[0] if key in seeded else digest for key, digest in flat.items()}


def lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def data_of(page: str) -> dict[str, Any]:
    """Return what the script of a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', Path(page).read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])
