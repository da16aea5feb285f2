"""The verb that looks after a run's checkpoints."""

import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from cascade_train.__main__ import launch
from cascade_train.distributed.process_group import process_group
from cascade_train.engine.checkpoint.folder import Retention
from cascade_train.engine.checkpoint.store import CheckpointStore

RULE = {"keep_last": 2, "keep_every_steps": 4, "keep_best": 1, "best_metric": "loss", "best_mode": "min"}


def state(step):
    optimizer = {"state": {"w": torch.full((2000,), float(step))}}
    return {"phases": {"main": {"weights": {"w": torch.full((1000,), float(step))}, "optimizer": optimizer}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with checkpoints of steps 1 to 6, all kept; the lowest loss is that of step 3."""
    run = tmp_path_factory.mktemp("runs") / "x"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"every_steps": 1, **RULE}}))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {abs(n - 3) + 0.5}}}\n' for n in range(1, 7)))
    with process_group():
        rule = Retention(**{**RULE, "keep_last": None})
        store = CheckpointStore(run / "checkpoints", retention=rule, metrics=run / "metrics.jsonl")
        for step in range(1, 7):
            store.save(step, state(step), {"step": step})
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "x")


def damage(run, step):
    file = run / "checkpoints" / f"step_{step}" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_ls_says_why_each_stays(run, capsys):
    (run / "checkpoints" / "step_2" / "__0_0.distcp").write_bytes(b"short")
    assert launch(["checkpoints", "ls", str(run)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "step GiB age loss state"
    assert lines[1].endswith("2.5 will be pruned at the next save")
    assert "damaged: __0_0.distcp has 5 bytes" in lines[2]
    assert [line.rpartition(" s ")[2] for line in lines[3:]] == [
        "0.5 number 1 by loss", "1.5 every 4", "2.5 newest 2", "3.5 newest 2",
    ]  # fmt: skip


def test_a_path_may_hold_an_equals_sign(made, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(made, tmp_path / "sweep" / "lr=0.0001,rank=4")
    assert launch(["checkpoints", "ls", str(run)]) == 0
    monkeypatch.chdir(run.parent)
    assert launch(["checkpoints", "verify", run.name, "step_3"]) == 0
    assert launch(["checkpoints", "ls", "lr=0.5"]) == 2
    assert "ls needs a run" in capsys.readouterr().err


def test_verify_reads_every_byte(run, capsys):
    assert launch(["checkpoints", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": verified\n") == 6
    damage(run, 4)
    assert launch(["checkpoints", "verify", str(run)]) == 1
    assert "step_4: damaged: __0_0.distcp does not match the hash in its manifest" in capsys.readouterr().out
    assert launch(["checkpoints", "verify", str(run), "step_5"]) == 0
    assert capsys.readouterr().out == "step_5: verified\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "RUN", "step_9"], "step_9 is not a checkpoint of this run. There are: step_1, step_"),
        (["ls", "RUN/checkpoints"], "checkpoints is no run with checkpoints. Give the folder"),
        (["ls"], "ls needs a run."),
        (["ls", "RUN", "step_1"], "'step_1' is one word too many."),
        (["list", "RUN"], "list is unknown."),
    ],
)
def test_what_makes_no_sense_is_refused(run, capsys, words, said):
    assert launch(["checkpoints", *[word.replace("RUN", str(run)) for word in words]]) == 2
    assert said in f"\n{capsys.readouterr().err}"


@pytest.mark.parametrize("words", [[], ["--help"], ["verify", "--help"]])
def test_help_is_printed(capsys, words):
    assert launch(["checkpoints", *words]) == 0
    assert "verify RUN [step_<n>]" in capsys.readouterr().out


def test_looking_imports_no_torch(run):
    script = (
        "import sys; from cascade_train.__main__ import launch;"
        "assert all(launch(['checkpoints', action, sys.argv[1]]) == 0 for action in ('ls', 'verify'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(run)], check=True, capture_output=True, timeout=60)


def test_a_configuration_that_would_not_end_is_said_to_be_damaged(run, capsys):
    (run / "config.yaml").write_text("a: &a [x]\nb: *a")
    assert launch(["checkpoints", "ls", str(run)]) == 2
    said = capsys.readouterr().err
    assert "config.yaml is damaged (it has an alias, *a" in said
    assert "put back a whole copy of it." in said
