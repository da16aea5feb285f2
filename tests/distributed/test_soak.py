"""The soak in small: 100 steps with two kills; and that it would notice the smallest difference."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.soak import differences
from tests.warm.programs import warm_programs

SOAK = Path(__file__).resolve().parents[2] / "bench" / "soak.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_kills_in_100_steps_change_no_bit_and_memory_does_not_grow(tmp_path):
    command = [str(warm_programs() / "python"), str(SOAK), "--steps=100", "--kill-every=50", f"--folder={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout
    assert "the same bits as undisturbed" in done.stdout


def a_run(folder, steps=2):
    """Make the files of a run that are compared."""
    (folder / "export").mkdir(parents=True)
    save_file({"weight": torch.tensor([0.0, 1.0])}, folder / "export" / "network.safetensors")
    (folder / "checkpoints" / f"step_{steps}").mkdir(parents=True)
    files = {"__0_0.distcp": {"size": 1, "sha256": "a"}, ".metadata": {"size": 1, "sha256": "b"}}
    (folder / "checkpoints" / f"step_{steps}" / "manifest.json").write_text(json.dumps({"files": files}))
    rows = [{"step": step, "loss": 0.5, "images_per_second": 1.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_smallest_difference_between_runs_is_found(tmp_path):
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    assert differences(one, other, 2) == []
    file = other / "export" / "network.safetensors"
    save_file({"weight": load_file(file)["weight"] * torch.tensor([-1.0, 1.0])}, file)
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('{"step": 2, "loss": 0.5', '{"step": 2, "loss": 0.50000001'))
    manifest = other / "checkpoints" / "step_2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"a"', '"c"'))
    assert differences(one, other, 2) == [
        "export/network.safetensors: weight",  # 0.0 and -0.0
        "checkpoint of step 2: __0_0.distcp",
        "metrics of step 2",
    ]
