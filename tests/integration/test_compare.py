"""`cascade-train compare` finds where two runs differ, and nothing where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.engine.checkpoint import loading
from cascade_train.engine.checkpoint.folder import read_manifest
from tests.integration.runs import NARROW, train

pytestmark = pytest.mark.slow

RUN = (*NARROW, "task=lora", "data=shapes", "data.num_workers=0", "optimizer.lr=1e-3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("compare") / "run", *RUN)


def compared(capsys: pytest.CaptureFixture[str], one: Path, other: Path) -> tuple[int, str]:
    """Return the exit code and what is shown, without the folders' names."""
    capsys.readouterr()
    code = launch(["compare", str(one), str(other)])
    return code, capsys.readouterr().out.replace(str(one), "ONE").replace(str(other), "OTHER")


def test_equal_runs_are_equal_and_their_tensors_are_not_read(tmp_path, capsys, monkeypatch, run):
    again = train(tmp_path / "again", *RUN)
    monkeypatch.setattr(loading, "load_entry", None)
    assert compared(capsys, run, again) == (
        0,
        "Settings: equal\n"
        "Versions and devices: equal\n"
        "Numbers: equal in the 4 steps that both have (the last is 4 of ONE, 4 of OTHER)\n"
        "Data: equal at step 4\n"
        "Checkpoints: equal at step 4\n",
    )


def test_another_seed_changes_all_but_the_version(tmp_path, capsys, run):
    other = train(tmp_path / "other", *RUN, "run.seed=1")
    code, text = compared(capsys, run, other)
    assert code == 1
    settings, rest = text.split("Versions and devices: equal\n")
    assert "  run.seed: 0 -> 1\n" in settings
    assert "Numbers: differ\n  first at step 1\n" in rest
    assert "Data: differ at step 2\n" in rest
    assert "  seed: 0 and 1\n" in rest
    assert "Checkpoints: differ at step 2\n" in rest


def test_a_changed_setting_is_found_at_its_first_step_and_in_the_checkpoint_behind_it(tmp_path, capsys, run):
    """The first two steps are equal, since a resume begins at the third."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for folder in ("checkpoints/step_4", "export"):
        shutil.rmtree(other / folder)
    train(other, *RUN, "optimizer.lr=2e-3")
    code, text = compared(capsys, run, other)
    assert code == 1
    assert "Settings: differ\n  optimizer.lr: 0.001 -> 0.002\n" in text
    assert "first at step 3\n  lr: 0.001 and 0.002 (1.0e+00 of it)\n" in text
    assert "Data: equal at step 4\n" in text
    first = text.split("Checkpoints: differ at step 4\n")[1].splitlines()[0]
    name, how = first.strip().split(": ")
    assert (".optimizer." in name, how.endswith("of its norm")) == (False, True)


def test_tensors_are_measured(capsys):
    one = torch.tensor([3.0, 4.0, float("nan")])
    assert loading._difference(one, one.clone()) is None
    assert loading._difference(one[:2], torch.tensor([3.0, 4.5])) == "1 of 2 values, 1.0e-01 of its norm"
    assert loading._difference(one, torch.tensor([3.0, 4.5, float("nan")])) == "1 of 3 values"
    assert loading._difference(one, one.half()) == "torch.float32 (3,) and torch.float16 (3,)"
    assert loading._difference(1, 1.0) == "1 and 1.0"
    assert loading._difference([0.9, 0.99], [0.9, 0.99]) is None


def test_entries_of_a_checkpoint_are_what_the_run_exported(run):
    path = run / "checkpoints" / "step_4"
    table = loading.read_table(path, read_manifest(path))
    keys = [
        key for key in table.state_dict_metadata if key.endswith(("lora_A.default.weight", "lora_B.default.weight"))
    ]
    saved = sorted(loading.load_entry(path, table, key).flatten().tolist() for key in keys)
    adapters = load_file(run / "export" / "lora" / "adapter_model.safetensors")
    exported = sorted(value.flatten().tolist() for value in adapters.values())
    assert saved == exported


def test_runs_that_have_no_step_in_common_are_not_compared(tmp_path, capsys, run):
    young = tmp_path / "young"
    shutil.copytree(run, young, ignore=lambda *_: ["checkpoints", "export"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (young / "metrics.jsonl").write_text("".join(json.dumps({**row, "step": row["step"] + 4}) + "\n" for row in rows))
    code, text = compared(capsys, run, young)
    assert code == 0
    assert "Numbers: not compared, no step is in both (the last is 4 of ONE, 8 of OTHER)\n" in text
    assert text.endswith("Checkpoints: not compared\n  no step has one in both\n")


def test_a_checkpoint_that_is_cut_short_is_named_as_left_out(tmp_path, capsys, run):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    file = next((other / "checkpoints/step_4").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    code, text = compared(capsys, run, other)
    assert code == 0
    assert "OTHER/checkpoints/step_4 is damaged, and not compared\n" in text
    assert text.endswith("Checkpoints: equal at step 2\n")


def test_an_export_is_no_run(capsys, run):
    assert launch(["compare", str(run), str(run / "export")]) == 2
    refusal = f"other={run / 'export'}: is no run; it has no environment.json and no checkpoints. Name the folder"
    assert refusal in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(tmp_path, capsys, run):
    other = train(tmp_path / "other", *RUN, "run.seed=1")
    file = other / "checkpoints" / "step_2" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert launch(["compare", str(run), str(other)]) == 1
    assert "step_2 cannot be compared, because it is damaged: __0_0.distcp does not match" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["from", "other"])
def test_what_is_no_run_is_refused(tmp_path, capsys, run, key):
    pair = [str(tmp_path), str(run)] if key == "from" else [str(run), str(tmp_path)]
    assert launch(["compare", *pair]) == 2
    assert f"{key}={tmp_path}: is no run; it has no config.yaml. Name the folder of a run." in capsys.readouterr().err
