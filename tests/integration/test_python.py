"""The library from Python: the same overrides, values back, errors as exceptions, several runs in one process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from cascade_train import ConfigError, Run, RunError, compose, evaluate, generate, plan, train
from cascade_train.commands.parts import python
from cascade_train.config.groups import typed_keys
from cascade_train.config.launch import replaced
from cascade_train.data.data_set import DataSet
from cascade_train.distributed.process_group import process_group
from cascade_train.engine.loop import Trainer
from cascade_train.signals import STOP_SIGNALS
from cascade_train.tasks.text_to_image import TextToImage
from tests.integration.runs import SMALL, read_metrics

LORA = ("task=lora", *SMALL, "train.max_steps=2", "data.num_workers=0")


@pytest.mark.slow
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
    for image, other in zip(images, same[:2], strict=True):
        assert np.abs(np.asarray(image).astype(int) - np.asarray(other)).max() <= 4, "products round by their batch"
    assert sorted(path.name for path in (tmp_path / "images").iterdir())[-2:] == ["00_03.png", "grid.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "runs"]
    again = {"real": tmp_path / "images", "features": "package:tiny", "count": 4, "steps": 1}
    found = evaluate(first, "a red circle", **again)
    assert found.images == 4
    assert found.measures["fid"] > -1e-3, "rounding may leave less than 0 of equal sets"
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
        ("optimizer.lr=1e-4,1e-3",): r"optimizer\.lr",
        ("data.path=nowhere",): r"data\.path=nowhere is not a folder",
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


def test_what_is_no_override_is_refused():
    for given in (["task=lora"], {"task": "lora"}, None):
        for call in (compose, train, plan):
            with pytest.raises(ConfigError, match=r"one after the other \(of a list: \*overrides\)"):
                call(given)


@pytest.mark.slow
def test_a_host_program_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in Jupyter: within a running loop; with Hydra, a log and random states of its own; after a failure too."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    gc.disable()

    def seen() -> list[Any]:
        root = logging.getLogger()
        log = [[*root.handlers], root.level, [handler.filters[:] for handler in root.handlers], warnings.showwarning]
        flags = [torch.backends.cuda.matmul.fp32_precision, torch.get_deterministic_debug_mode(), gc.isenabled()]
        own = [logging.getLogger("cascade_train").level, Path.cwd(), torch.get_default_dtype()]
        handlers = [signal.getsignal(each) for each in STOP_SIGNALS]
        return [*log, *flags, *own, handlers, torch.get_rng_state().tolist(), GlobalHydra.instance().hydra]

    async def cell(*overrides: str) -> Run:
        return train(*LORA, *overrides)

    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = seen()
        assert asyncio.run(cell("run.name=in_a_loop", "run.deterministic=true")).stopped is None
        assert seen() == before
        with monkeypatch.context() as patched:
            patched.setattr(TextToImage, "loss", Mock(side_effect=RuntimeError("kernel died")))
            with pytest.raises(RuntimeError, match="kernel died"):
                train(*LORA, "run.name=failed")
        assert seen() == before
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(train, *LORA, "run.name=failed").result().stopped is None
        assert len(generate("runs/failed", "a circle", steps=1)) == 1
        assert seen() == before
    gc.enable()
    with process_group(), pytest.raises(RunError, match="has joined a process group already"):
        train(*LORA, "run.name=second")
    assert not (tmp_path / "runs/second").exists()


def test_what_is_set_in_a_configuration_counts_as_typed():
    cfg = compose("task=lora", "model=c_tiny", "memory=auto", "train={global_batch_size: 8, micro_batch_size: 4}")
    cfg.activation_checkpointing = False
    varied = cfg.copy()
    varied.optimizer.lr = 1e-3
    with replaced(HydraConfig.instance(), "cfg", python._state(varied)):
        typed = typed_keys()
    assert {"task", "memory", "train.micro_batch_size", "train.global_batch_size", "optimizer.lr"} <= typed
    assert "activation_checkpointing" not in typed, "false already"
    varied.activation_checkpointing = True
    with replaced(HydraConfig.instance(), "cfg", python._state(varied)):
        assert set(HydraConfig.get().overrides.task[-2:]) == {"activation_checkpointing=true", "optimizer.lr=0.001"}
    assert python._state(cfg).hydra.overrides.task[-1].startswith("train={")


def test_groups_of_ones_own_are_found(tmp_path: Path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/slow.yaml").write_text("defaults: [adamw, _self_]\nlr: 1.0e-6\n")
    assert compose("task=lora", "model=c_tiny", "optimizer=slow", config_dir=tmp_path).optimizer.lr == 1e-6
    with pytest.raises(ConfigError, match="optimizer=slow is not an option"):
        compose("task=lora", "model=c_tiny", "optimizer=slow")


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: compose("task=lora model=c_tiny"),
            "2 overrides. Separate them by spaces: task=lora model=c_tiny",
        ),
        (lambda: compose("task=lora", config_dir="nosuch"), "config_dir=nosuch is not a folder"),
        (lambda: compose("task=lora", "task=finetune"), "task is chosen more than once"),
    ],
)
def test_a_wrong_call_is_refused_with_the_right_one(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_data_is_closed_where_closing_the_training_fails(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Trainer, "close", Mock(side_effect=OSError("no network")))
    monkeypatch.setattr(DataSet, "close", lambda data: closed.append(data))
    with pytest.raises(OSError, match="no network"):
        train(*LORA, f"run.dir={tmp_path / 'run'}")
    assert len(closed) == 1
