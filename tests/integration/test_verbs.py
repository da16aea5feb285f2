"""What a run leaves is enough to paint from and to export, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.commands import export as export_verb
from cascade_train.commands import generate as generate_verb
from cascade_train.errors import ConfigError, RunError
from tests.integration.runs import exported_weights, train

PROMPTS = ["a large red circle", "a small blue square"]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    return train(tmp_path_factory.mktemp("runs") / "finetuned", "task=finetune", "train.max_steps=4", "sample.steps=2")


@pytest.fixture(scope="module")
def lora(finetuned: Path) -> Path:
    """A LoRA whose base is that run."""
    weights = f"model.weights={finetuned}"
    return train(finetuned.with_name("lora"), "task=lora", weights, "train.max_steps=2", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def unfinished(finetuned: Path) -> Path:
    """The same run as it stood right after step 2."""
    folder = finetuned.with_name("unfinished")
    shutil.copytree(finetuned, folder, ignore=shutil.ignore_patterns("export", "step_4", ".lock"))
    return folder


ROUNDING = 4
"""Levels of 255 by which pictures differ for the products of another batch, which round otherwise."""


def generate(source: Path, out: Path, **arguments: object) -> dict[str, np.ndarray]:
    """Return what the verb paints, by file name."""
    given = {"steps": 2, "prompts": PROMPTS, **arguments}
    assert generate_verb.generate(generate_verb.GenerateArgs(source=str(source), out=str(out), **given)) == 0
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(out.iterdir())}


def apart(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> int:
    """Return the largest difference of a pixel's value between two sets of pictures of the same names."""
    assert left.keys() == right.keys()
    return max(int(np.abs(left[name] - right[name]).max()) for name in left)


def test_generate_paints_each_prompt_count_times_and_a_grid(finetuned: Path, tmp_path: Path) -> None:
    painted = generate(finetuned, tmp_path / "out", count=2)
    assert list(painted) == ["00_00.png", "00_01.png", "01_00.png", "01_01.png", "grid.png"]
    assert np.abs(painted["00_00.png"] - painted["00_01.png"]).max() > 10


def test_an_export_paints_the_same_wherever_it_is_moved(finetuned: Path, tmp_path: Path) -> None:
    before = generate(finetuned, tmp_path / "before")
    moved = tmp_path / "elsewhere"
    shutil.copytree(finetuned / "export", moved)
    assert apart(before, generate(moved, tmp_path / "after")) == 0


def test_pictures_depend_on_seed_prompt_and_number_alone(finetuned: Path, tmp_path: Path) -> None:
    three = generate(finetuned, tmp_path / "three", count=3, batch_size=6)
    again = generate(finetuned, tmp_path / "again", count=3, batch_size=1)
    assert apart(three, again) <= ROUNDING
    fewer = generate(finetuned, tmp_path / "fewer", prompts=PROMPTS[1:], count=1)
    assert np.abs(fewer["00_00.png"] - three["01_00.png"]).max() <= ROUNDING
    other = generate(finetuned, tmp_path / "other", count=3, seed=1)
    assert apart(three, other) > 10


def test_a_lora_on_a_run_paints_otherwise_than_its_base(finetuned: Path, lora: Path, tmp_path: Path) -> None:
    base = generate(finetuned, tmp_path / "base")
    adapted = generate(lora, tmp_path / "lora")
    assert apart(base, adapted) > 1
    moved = tmp_path / "moved"
    shutil.copytree(lora / "export", moved)
    assert apart(adapted, generate(moved, tmp_path / "again")) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "sample.steps=0 must be 1 or more"),
        ({"shift": 0.0}, "sample.shift=0.0 must be greater than 0"),
        ({"guidance_scale": float("nan")}, "sample.guidance_scale=nan must be a finite number"),
        ({"prompts": []}, r"prompts=\[\] names nothing to draw, e.g. "),
        ({"count": 0}, "count=0 must be 1 or more"),
    ],
)
def test_arguments_out_of_range_are_refused(
    finetuned: Path, tmp_path: Path, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(finetuned, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(finetuned: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be a folder: File exists. Choose another"):
        generate(finetuned, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_sources_that_cannot_be_painted_from_are_refused(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        generate(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"not written its export yet.*cascade-train export from="):
        generate(unfinished, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_export_of_a_checkpoint_is_that_of_a_run_which_ended_there(unfinished: Path, tmp_path: Path) -> None:
    ended = train(tmp_path / "ended", "task=finetune", "train.max_steps=2", "sample.steps=2")
    out = tmp_path / "out"
    assert export_verb.export(export_verb.ExportArgs(source=str(unfinished), out=str(out))) == 0
    names = [sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) for folder in (out, ended / "export")]
    assert [name for name in names[0] if name.startswith("prior/")] == [n for n in names[1] if n.startswith("prior/")]
    assert "prior/prior/diffusion_pytorch_model.safetensors" in names[0]
    stored = load_file(out / "prior" / "prior" / "diffusion_pytorch_model.safetensors")
    wanted = exported_weights(ended)
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)


def test_an_unfinished_run_paints_once_it_is_exported(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(unfinished, "mit Umlaut ü")
    for command in (["export", "step=2"], ["generate", "steps=1", 'prompts=["a red circle, large"]', "out=näher dran"]):
        assert launch([*command, "from=mit Umlaut ü"]) == 0, capsys.readouterr().err
    assert (tmp_path / "näher dran" / "00_00.png").is_file()
    assert "1 images and grid.png lie in näher dran" in capsys.readouterr().out


def test_checkpoints_that_are_not_there_or_damaged_are_not_exported(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3; steps that are there: 2\."):
        export_verb.export(export_verb.ExportArgs(source=str(unfinished), step=3))
    copy = tmp_path / "copy"
    shutil.copytree(unfinished, copy)
    shard = next((copy / "checkpoints" / "step_2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RunError, match="the checkpoint of step 2 is damaged"):
        export_verb.export(export_verb.ExportArgs(source=str(copy), step=2))
    assert not (copy / "export").exists()
