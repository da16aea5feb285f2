"""An index cache that may not be read or written is no reason to stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade_train.data import tar_index
from cascade_train.data.index_cache import read_cache


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_lock_that_may_not_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", _refuse)
    read = []
    with tar_index._one_reader(tmp_path / "a.npz", SimpleNamespace(is_remote=True)):  # type: ignore[arg-type]
        read.append("a")
    assert read == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_a_cached_index_that_may_not_be_read_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_cache(tmp_path / "none.npz") is None
    assert caplog.text == ""
    for method in ("open", "stat"):
        monkeypatch.setattr(Path, method, _refuse)
    assert read_cache(tmp_path / "a.npz") is None
    assert "may not be read" in caplog.text
