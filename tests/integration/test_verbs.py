"""What a run leaves is enough to paint from, wherever it lies, and to write in every format that fits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from bench.roundtrip_1b import roundtrip
from cascade_train.__main__ import launch
from cascade_train.commands import generate as generate_verb
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.merge import MergeArgs, merge
from cascade_train.errors import ConfigError, RunError
from tests.integration.runs import exported_weights, train

pytestmark = pytest.mark.slow

PROMPTS = ["a large red circle", "a small blue square"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    return train(tmp_path_factory.mktemp("runs") / "finetuned", "task=finetune", "train.max_steps=4", "sample.steps=2")


@pytest.fixture(scope="module")
def lora(base: Path) -> Path:
    """A LoRA whose base is that run."""
    weights = f"model.weights={base}"
    return train(base.with_name("lora"), "task=lora", weights, "train.max_steps=2", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def unfinished(base: Path) -> Path:
    """The same run as it stood right after step 2."""
    folder = base.with_name("unfinished")
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("export", "step_4", ".lock"))
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


def test_generate_paints_each_prompt_count_times_and_a_grid(base: Path, tmp_path: Path) -> None:
    painted = generate(base, tmp_path / "out", count=2)
    assert list(painted) == ["00_00.png", "00_01.png", "01_00.png", "01_01.png", "grid.png"]
    assert np.abs(painted["00_00.png"] - painted["00_01.png"]).max() > 10


def test_an_export_paints_the_same_wherever_it_is_moved(base: Path, tmp_path: Path) -> None:
    before = generate(base, tmp_path / "before")
    moved = tmp_path / "elsewhere"
    shutil.copytree(base / "export", moved)
    assert apart(before, generate(moved, tmp_path / "after")) == 0


def test_pictures_depend_on_seed_prompt_and_number_alone(base: Path, tmp_path: Path) -> None:
    three = generate(base, tmp_path / "three", count=3, batch_size=6)
    again = generate(base, tmp_path / "again", count=3, batch_size=1)
    assert apart(three, again) <= ROUNDING
    fewer = generate(base, tmp_path / "fewer", prompts=PROMPTS[1:], count=1)
    assert np.abs(fewer["00_00.png"] - three["01_00.png"]).max() <= ROUNDING
    other = generate(base, tmp_path / "other", count=3, seed=1)
    assert apart(three, other) > 10


def test_a_lora_on_a_run_paints_otherwise_than_its_base(base: Path, lora: Path, tmp_path: Path) -> None:
    plain = generate(base, tmp_path / "base")
    adapted = generate(lora, tmp_path / "lora")
    assert apart(plain, adapted) > 1
    moved = tmp_path / "moved"
    shutil.copytree(lora / "export", moved)
    assert apart(adapted, generate(moved, tmp_path / "again")) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"shift": 0.0}, "shift=0.0 must be greater than 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan must be a finite number"),
        ({"prompts": []}, r"prompts=\[\] names nothing to draw, e.g. "),
        ({"count": 0}, "count=0 must be 1 or more"),
    ],
)
def test_arguments_out_of_range_are_refused(
    base: Path, tmp_path: Path, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(base, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="is a file, and a folder is written"):
        generate(base, tmp_path / "out")
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
    assert export(ExportArgs(source=str(unfinished), out=str(out))) == 0
    names = [sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) for folder in (out, ended / "export")]
    assert [name for name in names[0] if name.startswith("prior/")] == [n for n in names[1] if n.startswith("prior/")]
    assert "prior/prior/diffusion_pytorch_model.safetensors" in names[0]
    stored = load_file(out / "prior" / "prior" / "diffusion_pytorch_model.safetensors")
    wanted = exported_weights(ended)
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
    assert export(ExportArgs(source=str(ended), out=str(out))) == 0, "an export replaces an export"


@pytest.mark.parametrize("name", ["prior/mine.txt", "README.md", "samples.png", "config.yaml"])
def test_an_export_replaces_nothing_else(unfinished: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "prior").mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"out=.*{name.partition('/')[0]} exists, .*overwrite=true"):
        export(ExportArgs(source=str(unfinished), out=str(tmp_path)))
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["README.md", "lora/adapter_config.json", "lora.kohya.safetensors"])
def test_a_conversion_replaces_nothing_else(lora: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / name).write_text("mine")
    of_lora = {"source": str(lora / "export" / "lora"), "out": str(tmp_path), "format": ["peft", "kohya"]}
    with pytest.raises(ConfigError, match=rf"out=.*{name.partition('/')[0]} exists, .*overwrite=true"):
        export(ExportArgs(**of_lora))
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / "lora" / "notes.txt").write_text("mine")
    for overwrite in (True, False):
        assert export(ExportArgs(**of_lora, overwrite=overwrite)) == 0
    assert (tmp_path / "lora" / "notes.txt").read_text() == "mine"


def test_an_unfinished_run_paints_once_it_is_exported(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(unfinished, "mit Umlaut ü")
    for command in (["export", "step=2"], ["generate", "steps=1", 'prompts=["a red circle, large"]', "out=näher dran"]):
        assert launch([*command, "from=mit Umlaut ü"]) == 0, capsys.readouterr().err
    assert (tmp_path / "näher dran" / "00_00.png").is_file()
    assert "1 images from 00_00.png on, and grid.png, lie in näher dran" in capsys.readouterr().out
    first = (tmp_path / "näher dran" / "00_00.png").read_bytes()
    assert launch([*command, "from=mit Umlaut ü", "seed=1"]) == 0
    assert "1 images from 01_00.png on, and grid_01.png" in capsys.readouterr().out
    assert (tmp_path / "näher dran" / "00_00.png").read_bytes() == first


def test_checkpoints_that_are_not_there_or_damaged_are_not_exported(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3; steps that are there: 2\."):
        export(ExportArgs(source=str(unfinished), step=3))
    copy = tmp_path / "copy"
    shutil.copytree(unfinished, copy)
    shard = next((copy / "checkpoints" / "step_2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RunError, match="the checkpoint of step 2 is damaged"):
        export(ExportArgs(source=str(copy), step=2))
    assert not (copy / "export").exists()


def test_a_single_file_trains_a_step_and_comes_out_equal_but_for_it(tmp_path: Path) -> None:
    found = roundtrip("c_tiny", tmp_path)
    assert found.passed, found


def test_a_run_is_exported_in_every_format(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["comfyui", "kohya", "original"]
    export(ExportArgs(source=str(lora), format=formats, out=str(tmp_path)))
    told = capsys.readouterr().out
    names = [f"lora.{name}.safetensors" for name in formats]
    assert all(
        (tmp_path / name).is_file() and f"{tmp_path / name}: read back with a relative error of" in told
        for name in names
    )
    assert "step_2 of" in told
    # and each of them is a source again
    for name in names:
        export(ExportArgs(source=str(tmp_path / name), format="peft", model="c_tiny", out=str(tmp_path / "again")))
        again = load_file(tmp_path / "again" / "lora" / "adapter_model.safetensors")
        assert {key.rsplit(".lora_", 1)[0] for key in again} == {
            key.rsplit(".lora_", 1)[0] for key in load_file(lora / "export" / "lora" / "adapter_model.safetensors")
        }


def test_conversions_of_another_step_do_not_stay_in_the_export(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (
        "task=lora",
        'task.train_tokens=[["[s]","^left</w>"]]',
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=2",
    )
    train(run, *settings, "train.max_steps=2")

    def conversions() -> list[str]:
        return sorted(path.name for path in (run / "export").glob("lora.*"))

    export(ExportArgs(source=str(run), format=["comfyui"], step=2))
    export(ExportArgs(source=str(run), format=["kohya"]))  # of the same step
    both = ["lora.comfyui.embeddings", "lora.comfyui.safetensors", "lora.kohya.embeddings", "lora.kohya.safetensors"]
    assert conversions() == both
    export(ExportArgs(source=str(run), step=1))
    assert conversions() == []
    export(ExportArgs(source=str(run), format=["comfyui"]))
    train(run, *settings, "train.max_steps=3")
    assert conversions() == []


def test_weights_are_converted_without_a_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(ExportArgs(source=str(base / "export"), format="original", dtype="bf16", out=str(tmp_path)))
    export(ExportArgs(source=str(base / "export" / "prior" / "prior"), format="original", out=str(tmp_path / "deep")))
    single = tmp_path / "prior.original.safetensors"
    assert {value.dtype for value in load_file(single).values()} == {torch.bfloat16}
    export(ExportArgs(source=str(single), format="diffusers", model="c_tiny", out=str(tmp_path)))
    assert capsys.readouterr().out.count("read back with a relative error of") == 3
    found = load_file(tmp_path / "prior" / "diffusion_pytorch_model.safetensors")
    wanted = load_file(base / "export" / "prior" / "prior" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in wanted.items())
    export(ExportArgs(source=str(base / "export"), format="diffusers", dtype="bf16", out=str(tmp_path / "half")))
    half = load_file(tmp_path / "half" / "prior" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(half[name], value) for name, value in found.items())
    place = str(tmp_path / "half")
    with pytest.raises(ConfigError, match="would replace .*half, which is read"):
        export(ExportArgs(source=place, format="diffusers", dtype="fp32", model="c_tiny", out=place))


def test_a_lora_is_merged_and_the_result_trains(base: Path, lora: Path, tmp_path: Path) -> None:
    merge(MergeArgs(source=str(base), lora=[str(lora)], strength=[0.5], out=str(tmp_path / "merged")))
    single = str(tmp_path / "merged.safetensors")
    for _ in range(2):  # its own work is replaced
        merge(MergeArgs(source=str(base), lora=str(lora), out=single, dtype="bf16"))
    for out in (str(base), str(lora), str(base / "export" / "prior" / "prior"), str(tmp_path)):
        with pytest.raises(ConfigError, match="Name another out="):
            merge(MergeArgs(source=str(base), lora=str(lora), out=out))
    before = load_file(base / "export" / "prior" / "prior" / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".attention.to_" in name and name.endswith("weight") for name in changed)
    assert "down_blocks.0.2.attention.attn.in_proj_weight" in load_file(tmp_path / "merged.safetensors")
    train(tmp_path / "run", "task=finetune", f"model.weights={tmp_path / 'merged'}", "train.max_steps=1")


def test_what_does_not_fit_is_refused(base: Path, lora: Path, tmp_path: Path) -> None:
    single = lora / "export" / "lora" / "adapter_model.safetensors"
    with pytest.raises(ConfigError, match="is no run with checkpoints; say what to write it as, e.g. format=original"):
        export(ExportArgs(source=str(single)))
    for missing in ("gone.safetensors", str(tmp_path / "gone"), "owner/gone.safetensors"):
        with pytest.raises(ConfigError, match=f"from={missing}: no such file or folder"):
            export(ExportArgs(source=missing, format="kohya"))
    with pytest.raises(ConfigError, match="format=comfy is unknown. Did you mean comfyui"):
        ExportArgs(source=str(single), format="comfy")
    with pytest.raises(ConfigError, match="no published size; name it by model=, one of b_3b, .*c_tiny"):
        export(ExportArgs(source=str(shutil.copy(single, tmp_path / "lora.safetensors")), format="kohya"))
    with pytest.raises(ConfigError, match="step=2: is for a run with checkpoints; from=.* is none"):
        export(ExportArgs(source=str(single), format="kohya", step=2))
    with pytest.raises(ConfigError, match="model=c_4b: no such option"):
        export(ExportArgs(source=str(single), format="kohya", model="c_4b"))
    with pytest.raises(ConfigError, match="dtype=fp16 must be bf16, fp32 or null"):
        MergeArgs(source="x", lora=["y"], out="z", dtype="fp16")
    with pytest.raises(ConfigError, match=r"lora=\[\] names nothing to merge"):
        MergeArgs(source="x", lora=[], out="z")
    for strength in ([1.0, 2.0], "much"):
        with pytest.raises(ConfigError, match=r"strength=.* must be a number, or have one for each of lora=\['y'\]"):
            MergeArgs(source="x", lora="y", strength=strength, out="z")


def test_what_does_not_fit_a_run_is_refused_before_its_export_is_written(base: Path, lora: Path) -> None:
    before = [(path, path.stat().st_mtime_ns) for run in (base, lora) for path in sorted((run / "export").rglob("*"))]
    refused = {
        "dtype=bf16: is for what format= names. Add format=original for": (base, None, "bf16"),
        "dtype=bf16: format=diffusers would replace the pipeline in .* by its": (base, "diffusers", "bf16"),
        "dtype=bf16: is for a network's weights; adapters are written in fp32": (lora, "kohya", "bf16"),
        "format=diffusers: from=.* holds adapters, whose formats are peft, comfyui": (lora, "diffusers", None),
        "format=kohya: from=.* holds a network's weights, whose formats are": (base, "kohya", None),
    }
    for message, (run, format, dtype) in refused.items():
        with pytest.raises(ConfigError, match=message):
            export(ExportArgs(source=str(run), format=format, dtype=dtype))
    assert before == [(path, path.stat().st_mtime_ns) for path, _ in before]
