"""The library from Python: the same overrides, values back, errors as exceptions, several runs in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from cascade_train import ConfigError, Run, compose, evaluate, generate, plan, train
from tests.integration.runs import SMALL, read_metrics

LORA = ("task=lora", *SMALL, "train.max_steps=2", "data.num_workers=0")


def test_a_notebook_composes_trains_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = HydraConfig.instance().cfg
    cfg = compose(*LORA, "run.name=first")
    assert (cfg.run.dir, cfg.train.max_steps, cfg.data.image_size) == ("runs/first", 2, cfg.model.image_size)
    compose("task=finetune", "model=c_tiny")
    first = train(cfg)
    assert first == Run.of("runs/first")
    assert first.path == tmp_path / "runs/first"
    assert (first.metrics["step"], first.stopped, first.export) == (2, None, first.path / "export")
    assert [row["step"] for row in first.rows()] == [1, 2]
    start = json.loads((first.path / "start.json").read_text())
    assert start["overrides"] == [*LORA, "run.name=first"]
    stopped = train(*LORA, "run.name=second", "run.max_hours=1e-9")
    assert stopped.metrics["step"] == 1
    assert stopped.stopped is not None
    assert stopped.stopped.startswith("Stopped by")
    assert stopped.export is None
    second = train(*LORA, "run.name=second")
    assert (second.stopped, second.metrics["loss"]) == (None, first.metrics["loss"])
    assert read_metrics(second.path) == read_metrics(first.path)
    images = generate(first, "a red circle", count=2, steps=1)
    assert [type(image).__name__ for image in images] == ["Image", "Image"]
    same = generate("runs/second/export", ["a red circle"], count=4, steps=1, out=tmp_path / "images")
    assert [image.tobytes() for image in same[:2]] == [image.tobytes() for image in images]
    assert sorted(path.name for path in (tmp_path / "images").iterdir())[-2:] == ["00_03.png", "grid.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "runs"]
    again = {"real": tmp_path / "images", "features": "package:tiny", "count": 4, "steps": 1}
    found = evaluate(first, "a red circle", **again)
    assert found.images == 4
    assert found.measures["fid"] >= 0.0
    assert HydraConfig.instance().cfg is before


def test_a_plan_prints_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    found = plan("task=lora", "model=c_tiny", "data.num_workers=0", ranks=2, device="rtx4090")
    assert (found.ranks, found.device, found.steps) == (2, "rtx4090", 10_000)
    assert found.samples.count == 2000
    assert str(plan(compose("task=lora", "model=c_tiny"), ranks=2, device="rtx4090")) == str(found)
    assert capsys.readouterr().out == ""


def test_what_the_command_line_refuses_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for overrides, message in {
        ("train.max_stepz=2",): r"train\.max_stepz is unknown\. Did you mean train\.max_steps\?",
        ("train.max_steps=0",): r"train\.max_steps=0 must be 1 or more",
        ("optimizer.lr=1e-4,1e-3",): "has several values: call this for each",
        ("data.path=nowhere",): r"data\.path=nowhere is not a folder",
        ("--multirun",): r"'--multirun' is an option of the command line",
        ("hydra.run.dir=x",): r"Write: run\.dir=x",
    }.items():
        with pytest.raises(ConfigError, match=message):
            train("task=lora", "model=c_tiny", *overrides)
    cfg = compose("task=lora", "model=c_tiny")
    cfg.model.image_size = 64
    assert cfg.data.image_size == 64
    cfg.optimizer.lr = -1.0
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1.0 must be positive"):
        train(cfg)
    with pytest.raises(ConfigError, match="one configuration of compose"):
        train(cfg, "train.max_steps=2")
    with pytest.raises(ConfigError, match=r"stepz is unknown\. Did you mean steps\?"):
        generate("runs/a", "a circle", stepz=2)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        Run.of("runs/a")
    assert not list(tmp_path.iterdir())


def test_groups_of_ones_own_are_found(tmp_path: Path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/slow.yaml").write_text("defaults: [adamw, _self_]\nlr: 1.0e-6\n")
    assert compose("task=lora", "model=c_tiny", "optimizer=slow", config_dir=tmp_path).optimizer.lr == 1e-6
    with pytest.raises(ConfigError, match="optimizer=slow is not an option"):
        compose("task=lora", "model=c_tiny", "optimizer=slow")


def test_importing_the_library_imports_nothing_else():
    code = """
import sys
before = set(sys.modules)
import cascade_train
assert "train" in dir(cascade_train) and cascade_train.__version__
print(sorted({name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names))
from cascade_train import compose
compose("task=lora", "model=c_tiny")
print("diffusers.models" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['cascade_train']\nFalse\n", done.stderr
