"""The verbs that write other programs' files: what goes in comes out, and what does not fit is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.roundtrip_1b import roundtrip
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.merge import MergeArgs, merge
from cascade_train.errors import ConfigError
from tests.integration.runs import train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a run that has ended."""
    return train(tmp_path_factory.mktemp("base") / "run", "task=finetune", "train.max_steps=1")


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on them."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    return train(directory, "task=lora", f"model.weights={base}", "train.max_steps=2", "optimizer.lr=1e-2")


def test_a_single_file_trains_a_step_and_comes_out_equal_but_for_it(tmp_path: Path) -> None:
    found = roundtrip("c_tiny", tmp_path)
    assert found.passed, found


def test_a_run_is_exported_in_every_format(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["single", "comfyui", "kohya", "original"]
    export(ExportArgs(source=str(lora), format=formats, out=str(tmp_path)))
    told = capsys.readouterr().out
    names = ["lora.safetensors", *(f"lora.{name}.safetensors" for name in formats[1:])]
    assert all(
        (tmp_path / name).is_file() and f"{tmp_path / name}: read back with a relative error of" in told
        for name in names
    )
    assert "step_2 of" in told
    # and each of them is a source again
    for name in names:
        export(ExportArgs(source=str(tmp_path / name), format="peft", model="c_tiny", out=str(tmp_path / "again")))
        again = load_file(tmp_path / "again" / "lora" / "lora.safetensors")
        assert {key.rsplit(".lora_", 1)[0] for key in again} == {
            key.rsplit(".lora_", 1)[0] for key in load_file(lora / "export" / "lora" / "lora.safetensors")
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


def test_a_lora_is_merged_and_the_result_trains(base: Path, lora: Path, tmp_path: Path) -> None:
    merge(MergeArgs(source=str(base), lora=[str(lora)], strength=[0.5], out=str(tmp_path / "merged")))
    merge(MergeArgs(source=str(base), lora=str(lora), out=str(tmp_path / "merged.safetensors"), dtype="bf16"))
    before = load_file(base / "export" / "prior" / "prior" / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".attention.to_" in name and name.endswith("weight") for name in changed)
    assert "down_blocks.0.2.attention.attn.in_proj_weight" in load_file(tmp_path / "merged.safetensors")
    train(tmp_path / "run", "task=finetune", f"model.weights={tmp_path / 'merged'}", "train.max_steps=1")


def test_what_does_not_fit_is_refused(base: Path, lora: Path, tmp_path: Path) -> None:
    single = lora / "export" / "lora" / "lora.safetensors"
    with pytest.raises(ConfigError, match="is no run with checkpoints; say what to write it as, e.g. format=original"):
        export(ExportArgs(source=str(single)))
    with pytest.raises(ConfigError, match="format=comfy is unknown. Did you mean comfyui"):
        ExportArgs(source=str(single), format="comfy")
    with pytest.raises(ConfigError, match="format=diffusers: from=.* holds adapters, whose formats are peft, single"):
        export(ExportArgs(source=str(single), format="diffusers"))
    with pytest.raises(ConfigError, match="format=kohya: from=.* holds a network's weights, whose formats are"):
        export(ExportArgs(source=str(base / "export" / "prior"), format="kohya"))
    with pytest.raises(ConfigError, match="no published size; name it by model=, one of b_3b, .*c_tiny"):
        export(ExportArgs(source=str(shutil.copy(single, tmp_path / "lora.safetensors")), format="kohya"))
    with pytest.raises(ConfigError, match="step=2: is for a run with checkpoints; from=.*lora.safetensors is none"):
        export(ExportArgs(source=str(single), format="single", step=2))
    with pytest.raises(ConfigError, match="dtype=bf16: is for a network's weights; adapters are written in fp32"):
        export(ExportArgs(source=str(single), format="single", dtype="bf16", model="c_tiny"))
    with pytest.raises(ConfigError, match="model=c_4b: no such option"):
        export(ExportArgs(source=str(single), format="kohya", model="c_4b"))
    with pytest.raises(ConfigError, match="dtype=fp16 must be bf16, fp32 or null"):
        ExportArgs(source=str(single), dtype="fp16")
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
        "dtype=bf16: is for what format= names. Add format=diffusers for": (base, None, "bf16"),
        "dtype=bf16: is for a network's weights; adapters are written in fp32": (lora, "single", "bf16"),
        "format=diffusers: from=.* holds adapters, whose formats are peft, single": (lora, "diffusers", None),
        "format=kohya: from=.* holds a network's weights, whose formats are": (base, "kohya", None),
    }
    for message, (run, format, dtype) in refused.items():
        with pytest.raises(ConfigError, match=message):
            export(ExportArgs(source=str(run), format=format, dtype=dtype))
    assert before == [(path, path.stat().st_mtime_ns) for path, _ in before]
