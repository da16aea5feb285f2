"""The folder of an evaluation is continued, emptied or refused, by what its pictures depend on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cascade_train.errors import ConfigError
from cascade_train.results.evaluation.judge import claim
from cascade_train.results.evaluation.pictures import Folder


def claimed(out: Path, weights: str, *, seed: int = 0, run: Path | None = None) -> bool:
    """Claim a folder; return whether the picture that lay in it is still there."""
    claim(out, {"from": weights, "seed": seed}, run=run)
    Folder(out).make()
    was_there = Folder(out).picture(0).is_file()
    Folder(out).picture(0).touch()
    return was_there


def test_pictures_stay_where_nothing_has_changed(tmp_path: Path) -> None:
    assert not claimed(tmp_path / "out", "a", run=tmp_path)
    assert claimed(tmp_path / "out", "a", run=tmp_path)
    assert claimed(tmp_path / "out", "a"), "another way to name the same weights"


def test_pictures_of_weights_that_the_run_replaced_are_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claimed(tmp_path / "out", "a", run=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not claimed(tmp_path / "out", "b", run=tmp_path)
    assert "the run has saved this step again since; its pictures are made anew" in caplog.text
    assert claimed(tmp_path / "out", "b", run=tmp_path)


def test_pictures_of_another_run_or_of_no_run_are_never_removed(tmp_path: Path) -> None:
    claimed(tmp_path / "out", "a", run=tmp_path / "one")
    for run in (tmp_path / "other", None):
        with pytest.raises(ConfigError, match="holds pictures of another evaluation, which differs in from"):
            claimed(tmp_path / "out", "b", run=run)
    with pytest.raises(ConfigError, match="which differs in from, seed"):
        claimed(tmp_path / "out", "b", seed=1, run=tmp_path / "one")
    claimed(tmp_path / "plain", "a")
    with pytest.raises(ConfigError, match="which differs in from"):
        claimed(tmp_path / "plain", "b")
    assert claimed(tmp_path / "out", "a", run=tmp_path / "one")
