"""A run that was saved before the package got its rooms continues as it would have: `_target_` paths still resolve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from torch.distributed.checkpoint.metadata import TensorProperties

from cascade_train.config.saved import load_saved_config
from tests.frozen.frozen_set import use_its_weights
from tests.integration.runs import TIMING, read_metrics, train

SAVED = Path(__file__).parents[1] / "golden" / "saved" / "before_rooms"
"""Stopped at step 2 of 4 by an older version; its metrics are those of the whole run, see tests/golden/README.md."""

COMMAND = (
    *("task=lora", "objective=adaptive", "task.rank=1", "task.module_filters=[to_q]", "optimizer.lr=1e-2"),
    *("train.global_batch_size=4", "data.num_workers=0", "ema.start_step=1", "checkpoint.keep_last=null"),
    "validate.every_steps=null",
)


@pytest.mark.skipif(
    "strides" not in TensorProperties.__dataclass_fields__, reason="a newer torch wrote its table of contents"
)
def test_an_older_run_continues_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    use_its_weights(monkeypatch, tmp_path / "weights")
    shutil.copytree(SAVED, run)
    expected = [{k: v for k, v in row.items() if k not in TIMING} for row in map(json.loads, lines(SAVED))]
    assert [row["step"] for row in expected] == [1, 2, 3, 4]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines(SAVED)[:2]))
    train(run, *COMMAND)
    found = read_metrics(run)
    assert found[:2] == expected[:2]
    for row, wanted in zip(found[2:], expected[2:], strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)
    (line,) = lines(run, "config_history.jsonl")
    changed = json.loads(line)
    assert changed["step"] == 2
    assert changed["changes"].keys() == {"run.dir"}


def lines(run: Path, file: str = "metrics.jsonl") -> list[str]:
    return (run / file).read_text().splitlines()


def test_every_target_of_an_older_configuration_still_resolves() -> None:
    written = targets(yaml.safe_load((SAVED / "config.yaml").read_text()))
    assert len(written) >= 10
    assert targets(OmegaConf.to_container(load_saved_config(SAVED))) == written


def targets(node: Any) -> list[str]:
    """Return the `_target_` of every component below a node, in order."""
    if not isinstance(node, dict):
        return []
    own = [node["_target_"]] if "_target_" in node else []
    return own + [target for key in sorted(node) for target in targets(node[key])]
