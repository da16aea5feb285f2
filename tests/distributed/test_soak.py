"""The soak in small: 100 steps with two kills; and that it would notice what it looks for."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.soak import expect
from bench.soak_ranks import LAST_STEPS, End, moments
from bench.soak_report import differences, growth, page, verdicts
from tests.warm.programs import warm_programs

SOAK = Path(__file__).resolve().parents[2] / "bench" / "soak.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_kills_in_100_steps_change_no_bit_and_memory_does_not_grow(tmp_path):
    command = [str(warm_programs() / "python"), str(SOAK), "--steps=100", "--kill-every=50", f"--folder={tmp_path}"]
    done = subprocess.run([*command, f"--out={tmp_path / 'page.md'}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    first, second = (each["step"] for each in found["disturbed"]["kills"])
    assert 0 < first <= 52 < second < 100
    assert "bit for bit" in (tmp_path / "page.md").read_text()
    assert [name for name in found if name not in ("settings", "passes")] == ["undisturbed", "disturbed", "differences"]


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
    save_file({"weight": load_file(file)["weight"] * -1.0 * torch.tensor([1.0, -1.0])}, file)
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('{"step": 2, "loss": 0.5', '{"step": 2, "loss": 0.50000001'))
    manifest = other / "checkpoints" / "step_2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"a"', '"c"').replace('"b"', '"d"'))
    assert differences(one, other, 2) == [
        "export/network.safetensors: weight",  # 0.0 and -0.0
        "checkpoint of step 2: __0_0.distcp",
        "metrics of step 2",
    ]
    shutil.copy(one / "metrics.jsonl", metrics)
    with metrics.open("a") as file:
        file.write('{"step": 2}\n')
    assert differences(one, other, 2)[-1] == "metrics of 2 and 3 steps"


def soaked(**changes):
    """Return what a soak without a fault found, but for what is changed."""
    steady = {"mib": [100.0, 101.0], "files": [9.0, 9.0], "threads": [4.0, 4.0]}
    undisturbed = {"seconds": 1.0, "memory": [steady, {**steady, **changes.pop("memory", {})}]}
    return {
        "settings": {"commit": "0", "steps": 200, "kill_every": 100, "seed": 0},
        "undisturbed": undisturbed,
        "disturbed": {"seconds": 1.0, "kills": [{"ranks": [0, 1], "step": 7}] * 2},
        "differences": [],
        "passes": [{"code": 0, "said": "", "seconds": 1.0}],
        **changes,
    }


def test_a_soak_without_a_fault_is_met():
    assert all(met for _, met in verdicts(soaked(), 1))
    assert "0+1 in 7, 0+1 in 7." in page(soaked(), 1)
    assert "MISSED" not in page(soaked(), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": {"mib": [100.0, 110.0]}}, "memory: +10.0%"),
        ({"memory": {"files": [9.0, 12.0]}}, "open files and threads: +3.0"),
        ({"differences": ["metrics of step 3"]}, "the runs differ: metrics of step 3"),
        ({"disturbed": {"seconds": 1.0, "kills": []}}, "0 kills (2 asked)"),
        ({"passes": [{"code": 1, "said": "", "seconds": 1.0}]}, "passed 0 times (1 asked)"),
    ],
)
def test_what_a_soak_finds_is_missed(changes, words):
    (missed,) = [text for text, met in verdicts(soaked(**changes), 1) if not met]
    assert words in missed
    assert f"MISSED: {missed}" in page(soaked(**changes), 1)


def test_growth_is_seen_beside_a_start_that_allocates():
    rows = [{"step": step, "mib": 50.0 if step == 0 else 100.0 + step} for step in range(0, 40, 5)]
    assert growth(rows, 40) == {"mib": [112.5, 132.5]}


@pytest.mark.parametrize(
    "end",
    [
        End(codes=(1, 99), orphans=0, hung=(), seconds=1.0),
        End(codes=(1, -9), orphans=1, hung=(), seconds=1.0),
        End(codes=(1, -9), orphans=0, hung=(0,), seconds=1.0),
    ],
)
def test_ranks_that_end_otherwise_than_they_must_end_the_soak(tmp_path, end):
    expect(End(codes=(1, -9), orphans=0, hung=(), seconds=1.0), (1, -9), tmp_path)
    with pytest.raises(SystemExit, match="or a traceback"):
        expect(end, (1, -9), tmp_path)


def test_kills_are_one_to_a_stretch_and_the_same_for_a_seed():
    def drawn(seed):
        return list(moments(steps=2000, every_steps=100, seed=seed))

    kills = drawn(0)
    assert len(kills) == 20
    assert kills == drawn(0) != drawn(1)
    assert {kill.ranks for kill in kills} == {(0,), (1,), (0, 1)}
    assert [number for number, kill in enumerate(kills) if kill.step is None] == [4, 9, 14, 19]
    for number, kill in enumerate(kills):
        assert kill.step is None or 100 * number < kill.step < min(100 * (number + 1), 2000 - LAST_STEPS)
