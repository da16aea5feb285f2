"""The real wandb, offline: what a run writes for it is read back from wandb's own file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL, train

pytestmark = pytest.mark.slow

pytest.importorskip("wandb", reason="needs cascade-train[wandb]")

OFFLINE = (
    *(*SMALL_NETWORK, "task=finetune", "data.num_workers=0"),
    *("tracker=wandb", "tracker.project=tests", "tracker.mode=offline"),
)
BLOCK, HEADER = 32768, struct.Struct("<IHB")


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of wandb: a LevelDB log behind seven bytes."""
    data, at, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        at += HEADER.size + size
        part = (b"" if kind in (1, 2) else part) + data[at - size : at]
        if kind in (1, 4):
            yield part


def tracked(run: Path) -> list[dict[str, Any]]:
    """Return, per start of a run, its id, config, notes, alerts and steps."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        start: dict[str, Any] = {"alerts": [], "steps": [], "config": {}, "notes": ""}
        for chunk in chunks(path):
            record = wandb_internal_pb2.Record.FromString(chunk)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                start["id"], start["notes"] = record.run.run_id, record.run.notes
            if kind in ("run", "config"):
                changes = record.run.config if kind == "run" else record.config
                start["config"] |= {item.key: json.loads(item.value_json) for item in changes.update if item.key}
            if kind == "alert":
                start["alerts"].append((record.alert.title, record.alert.level))
            if kind == "history":
                row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                start["steps"] += [row["step"]] if "loss" in row else []
        found.append(start)
    return found


def test_wandb_gets_a_run_its_resume_and_its_end(tmp_path):
    train(tmp_path / "run", *OFFLINE, "train.max_steps=2")
    train(tmp_path / "run", *OFFLINE, "train.max_steps=4")
    first, second = tracked(tmp_path / "run")
    assert first["steps"] + second["steps"] == [1, 2, 3, 4]
    assert first["id"] == second["id"]
    assert first["config"]["train"]["max_steps"] == 2
    assert first["alerts"] == second["alerts"] == [("Finished", "INFO")]


def test_wandb_alerts_when_a_run_is_stopped(tmp_path):
    assert launch([*SMALL, *OFFLINE, f"run.dir={tmp_path / 'run'}", "run.max_hours=1e-9"]) == 75
    (start,) = tracked(tmp_path / "run")
    assert start["alerts"] == [("Stopped", "INFO")]
    assert start["notes"].startswith("Stopped by")


def test_wandb_alerts_when_a_loss_is_not_finite(tmp_path):
    broken = ["optimizer.lr=1e30", "train.max_grad_norm=null", "checkpoint.every_steps=null"]
    assert launch([*SMALL, *OFFLINE, f"run.dir={tmp_path / 'run'}", *broken]) == 1
    (start,) = tracked(tmp_path / "run")
    assert start["alerts"] == [("Failed", "ERROR")]
