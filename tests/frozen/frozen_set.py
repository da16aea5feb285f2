"""The set of runs that make.py froze: unpacked, and put where a test can go on with it."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import TensorProperties

from cascade_train.models.formats.weights_source import PACKAGED
from tests.integration.runs import read_metrics

HERE = Path(__file__).parent
COMMIT = "a18770c"
MADE_AT = "/tmp/cascade_train_frozen"
"""The folder that the set was made in: runs and caches hold to the absolute paths of weights and data."""
STEP, STEPS = 2, 4
"""Where each run was stopped, and how long it is."""

reads_checkpoints = pytest.mark.skipif(
    "strides" not in TensorProperties.__dataclass_fields__, reason="a newer torch wrote their tables of contents"
)


def use_its_weights(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let `package:tiny` be what it was then, in a new folder, and return that."""
    shutil.copytree(PACKAGED["package:tiny"], folder)
    shutil.copytree(HERE / "tiny_weights", folder, dirs_exist_ok=True)
    monkeypatch.setitem(PACKAGED, "package:tiny", folder)
    return folder


def unpack(folder: Path) -> Path:
    """Unpack the set into an empty folder and return it."""
    with tarfile.open(HERE / f"{COMMIT}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


def copy_as_if_made_there(unpacked: Path, folder: Path) -> dict[str, Any]:
    """Copy the set to where its runs go on; return the commands that made it, whose paths are relative."""
    shutil.copytree(unpacked, folder)
    for file in (*folder.rglob("config.yaml"), *folder.rglob("weights.json"), *folder.glob("cache/*.json")):
        file.write_text(file.read_text().replace(MADE_AT, str(folder)))
    return json.loads((folder / "frozen.json").read_text())


def stopped(run: Path) -> list[dict[str, Any]]:
    """Cut a run's metrics back to its checkpoint, and return those of the uninterrupted run."""
    expected = read_metrics(run)
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:STEP]))
    return expected


def assert_went_on(run: Path, expected: list[dict[str, Any]], tolerance: float) -> None:
    """Check that each metric of the uninterrupted run was met again, to a relative tolerance."""
    found = read_metrics(run)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert found[:STEP] == expected[:STEP]
    for row, wanted in zip(found[STEP:], expected[STEP:], strict=True):
        assert {key: row.get(key) for key in wanted} == pytest.approx(wanted, rel=tolerance)
