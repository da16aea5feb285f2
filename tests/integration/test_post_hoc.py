"""Averages of any length from a run's checkpoints, by the command, of a network and of a LoRA."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.commands.export import ExportArgs, export
from cascade_train.engine.checkpoint.folder import read_manifest
from cascade_train.engine.checkpoint.loading import load_entry, read_table
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import exported_step
from tests.integration.runs import NARROW, exported_weights, train

pytestmark = pytest.mark.slow

KEEPING = (
    *("ema.post_hoc=[0.05,0.1]", "train.max_steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=1"),
    *("checkpoint.keep_every_steps=2", "optimizer.lr=3e-3"),
)


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run", "task=finetune", *NARROW, *KEEPING, "ema.decay=0.5")


def kept(run: Path, step: int, length: str, name: str) -> torch.Tensor:
    """Return a tensor of an average as a checkpoint keeps it."""
    path = run / "checkpoints" / f"step_{step}"
    table = read_table(path, read_manifest(path))
    (key,) = (key for key in table.state_dict_metadata if f"post_hoc.{length}." in key and key.endswith(name))
    return load_entry(path, table, key)


def exported(run, out, **options):
    assert export(ExportArgs(source=str(run), out=str(out / "export"), **options)) == 0
    return out


def test_a_length_that_is_kept_is_exported_as_it_was_at_a_step(finetuned, tmp_path):
    for step in (4, None):
        weights = exported_weights(exported(finetuned, tmp_path, step=step, average=0.1))
        for name, value in weights.items():
            assert torch.equal(value, kept(finetuned, step or 6, "0.1", name)), name
        assert len(weights) > 20


def test_a_length_in_between_is_exported_and_paints(finetuned, tmp_path, capsys):
    weights = exported_weights(exported(finetuned, tmp_path, average=0.07))
    for average in (exported_weights(finetuned), exported_weights(exported(finetuned, tmp_path / "a", average=0.05))):
        assert any(not torch.equal(value, average[name]) for name, value in weights.items())
    paint = ["generate", f"from={tmp_path / 'export'}", "steps=1", 'prompts=["a red circle"]', f"out={tmp_path / 'b'}"]
    assert launch(paint) == 0, capsys.readouterr().err
    assert (tmp_path / "b" / "00_00.png").is_file()


def test_the_own_export_of_a_run_says_what_it_is_of(finetuned, tmp_path):
    run = Path(shutil.copytree(finetuned, tmp_path / "run"))
    for options, expected in (({"average": 0.07}, None), ({"step": 4}, 4), ({"step": 6}, 6)):
        assert export(ExportArgs(source=str(run), **options)) == 0
        assert exported_step(run) == expected


def test_an_average_of_a_lora_is_exported_in_its_formats(finetuned, tmp_path):
    run = train(tmp_path / "run", "task=lora", *NARROW, *KEEPING, f"model.weights={finetuned}", "task.rank=2")
    out = exported(run, tmp_path, average=0.1, format="kohya")
    found = load_file(out / "export" / "lora" / "adapter_model.safetensors")
    for name, value in found.items():
        inside = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(value, kept(run, 6, "0.1", inside)), name
    assert (out / "export" / "lora.kohya.safetensors").is_file()


def test_lengths_that_cannot_be_built_are_refused_and_nothing_is_written(finetuned, tmp_path):
    out = str(tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"average=0.25 cannot be built .* in 3 checkpoints up to step 6: .*keep_every"
    ):
        export(ExportArgs(source=str(finetuned), out=out, average=0.25))
    for length in (0.0, 0.29, float("nan")):
        with pytest.raises(ConfigError, match=rf"average={length} must lie between 0 and 0.2887"):
            ExportArgs(source=str(finetuned), out=out, average=length)
    with pytest.raises(ConfigError, match=r"average=0.1: is for a run with checkpoints; from=package:tiny"):
        export(ExportArgs(source="package:tiny", out=out, average=0.1, format="original"))
    assert not Path(out).exists()


def test_a_run_that_keeps_none_says_which_key_would(tmp_path):
    run = train(tmp_path / "run", "task=finetune", *NARROW, "train.max_steps=1")
    with pytest.raises(ConfigError, match=r"average=0.1: the checkpoints of .* keep no averages .* ema.post_hoc=\["):
        export(ExportArgs(source=str(run), out=str(tmp_path / "out"), average=0.1))
    assert not (tmp_path / "out").exists()


def test_averages_cannot_begin_in_the_middle(finetuned, capsys):
    code = launch(["task=finetune", "model=c_tiny", *NARROW, *KEEPING, "ema.post_hoc=[0.1]", f"run.dir={finetuned}"])
    assert code != 0
    assert "ema.post_hoc[0]: 0.05 -> 0.1" in capsys.readouterr().err
