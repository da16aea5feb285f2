"""Unreadable samples are listed in the run that met them, and left out of one that is given the list."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL, read_metrics, train
from tests.unit.data import tars

DAMAGED = ("a.tar:0004", "a.tar:0009", "a.tar:0013", "a.tar:0017")


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(24), damaged=[4, 9, 13, 17]))
    options = ["data=webdataset", f"data.urls={path}", "data.num_workers=0", "log.every_steps=1"]
    return [*SMALL_NETWORK, "task=finetune", *options]


def listed(run: Path) -> dict[str, int]:
    lines = (run / "quarantine" / "rank_0.jsonl").read_text().splitlines()
    return {row["sample"]: row["step"] for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_run_lists_what_it_cannot_read_and_the_next_leaves_it_out(
    tmp_path: Path, data: list[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = tmp_path / "first"
    assert (
        launch([*SMALL, *data, f"run.dir={first}"]) == 1
    )  # all are met within an epoch: more than a few, and than 1 %
    text = " ".join(capfd.readouterr().err.split())
    assert "samples are unreadable, more than data.max_unreadable_share=0.01 allows" in text
    assert "allow as many by data.max_unreadable_share=0.17. With that, this run continues; a new run" in text
    assert listed(first).keys() == set(DAMAGED)
    assert all(1 <= step <= 3 for step in listed(first).values())
    second = train(tmp_path / "second", *data, f"data.quarantine={first}", "train.max_steps=2")
    assert "Left out: 4 of 24 samples are listed in data.quarantine." in caplog.text
    assert not (second / "quarantine").exists()
    assert [row["step"] for row in read_metrics(second)] == [1, 2]
    assert read_metrics(train(first, *data, "data.max_unreadable_share=0.17", "train.max_steps=7"))[-1]["step"] == 7
    with (first / "quarantine" / "rank_0.jsonl").open("a") as file:
        file.write('{"sample": "a.tar:0005", "reason": "ugly", "step": 1}\n')
    assert launch([*SMALL, *data, f"run.dir={second}", f"data.quarantine={first}", "train.max_steps=3"]) == 2
    assert "other samples take part: set validate.share, data.size_filters, data.quarantine" in capfd.readouterr().err


def test_a_run_does_not_take_its_own_list(tmp_path: Path, data: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "run", tmp_path / "run" / "quarantine" / "rank_0.jsonl"):
        assert launch([*SMALL, *data, f"run.dir={tmp_path / 'run'}", f"data.quarantine={path}"]) == 2
        assert "is this run's own list, which grows while it trains" in capfd.readouterr().err
