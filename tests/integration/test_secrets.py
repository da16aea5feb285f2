"""No secret that reaches a run is found in anything that the run leaves or says."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL
from tests.unit.data import tars

pytestmark = pytest.mark.slow

HEADER, PASSWORD, SIGNATURE = "a1b2c3d4e5f6a7b8c9", "hunter2hunter2", "0815cafe0815cafe"
VARIABLE = "correct-horse-battery-0"
SECRETS = (HEADER, PASSWORD, SIGNATURE, VARIABLE)


def overrides(tar: Path, *, header: str = HEADER, signature: str = SIGNATURE) -> list[str]:
    """Return a run whose configuration holds a secret of every kind."""
    notes = [f"Authorization: Bearer {header}", f"https://anna:{PASSWORD}@a.b/c?sig={signature}"]
    command = f"cat {shlex.quote(str(tar))} && : {shlex.quote(notes[0])} {shlex.quote(notes[1])}"
    return [
        *SMALL,
        *SMALL_NETWORK,
        "task=finetune",
        "data=webdataset",
        f'data.urls=["pipe:{command}"]',
        "tracker=tensorboard",
        "train.max_steps=2",
        "sample.every_steps=2",
        "sample.steps=1",
        "sample.prompts=['${oc.env:PLANTED_PASSWORD}']",
        "data.num_workers=0",
    ]


def everything(folder: Path) -> bytes:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 12, files
    return b"\n".join(str(path).encode() + b"\n" + path.read_bytes() for path in files)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANTED_PASSWORD", VARIABLE)
    return tars.write(tmp_path / "a.tar", tars.samples(range(16)))


def started(directory: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    given = [*arguments, f"run.dir={directory}"]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "cascade_train", *given])
    return launch(given)


def test_no_secret_is_left_or_told_by_a_run_its_continuation_and_its_refusals(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert started(run, overrides(planted), monkeypatch) == 0
    again = [*overrides(planted, header="z9y8x7w6v5u4t3s2r1", signature="feed4711"), "train.max_steps=3"]
    assert started(run, again, monkeypatch) == 0, "a new token is no other run"
    other = [argument.replace("a.tar", "b.tar") for argument in overrides(planted)]
    assert started(run, other, monkeypatch) == 2
    assert started(tmp_path / "new", other, monkeypatch) == 1
    said = "".join(capfd.readouterr())
    assert "holds a run of another config" in said
    assert "ended with code 1" in said
    left = everything(run) + said.encode()
    assert not [secret for secret in (*SECRETS, "z9y8x7w6v5u4t3s2r1", "feed4711") if secret.encode() in left]
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data"]["urls"][0].startswith(f"pipe:cat {planted}"), "what is no secret stays"
    changes = [json.loads(line)["changes"] for line in (run / "config_history.jsonl").read_text().splitlines()]
    assert changes == [{"train.max_steps": [2, 3]}]
