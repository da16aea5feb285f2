from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.index.row_filter import ABSENT, FAILED, PASSED, parse_row_filters, passing
from cascade_train.data.tar import index as tar_index
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading

SCORES = {0: 3.0, 1: 5.0, 2: 6.0, 3: None, 4: 9.0, 5: "high"}


def scored(folder: Path) -> Path:
    """Write a tar of seven samples with the scores above; the last has no json."""
    files = tars.samples(range(7))
    files += [(f"{key:04d}.json", json.dumps({"score": s, "size": key}).encode()) for key, s in SCORES.items()]
    return tars.write(folder / "a.tar", sorted(files))


@pytest.mark.parametrize(
    "given",
    [[["score", "lambda s: s > 4.5"], ["size", "<= 3"]], {"score": "> 4.5", "size": "lambda n: n <= 3"}],
)
def test_a_list_and_a_mapping_mean_the_same(given: Any) -> None:
    filters = parse_row_filters(given)
    assert filters.verdicts(b'{"score": 5, "size": 4}') == [PASSED, PASSED, FAILED]
    assert filters.verdicts(b'{"score": 5}') == [PASSED, PASSED, ABSENT]
    assert [each.keys for each in filters.filters] == [("score",), ("size",)]


@pytest.mark.parametrize("metadata", [None, b"", b"{", b"[1]", b"\xff", b"[" * 200_000, b"9" * 5000])
def test_a_sample_without_readable_metadata_passes_no_filter(metadata: bytes | None) -> None:
    assert parse_row_filters([["score", "> 1"]]).verdicts(metadata) == [ABSENT, ABSENT]
    assert not passing(np.array([parse_row_filters([]).verdicts(metadata)]))[0]


def test_filters_of_another_text_have_another_identity() -> None:
    texts = [[["a", "> 1"]], [["a", "> 2"]], [["b", "> 1"]], [["a", "> 1"], ["a", "> 2"]], {"a": "> 3"}]
    assert len({parse_row_filters(given).identity for given in texts}) == len(texts)
    assert parse_row_filters({"a": "> 1"}).identity == parse_row_filters([["a", "> 1"]]).identity
    assert parse_row_filters(None).identity == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("score > 4", "must be a list of .key, condition. or a mapping of keys to conditions"),
        ([["score", 4]], r"data.row_filters\[0\]=.* is not a pair of a key and a condition"),
        (["score"], "is not a pair of a key and a condition"),
        ({"score": 0.5}, "data.row_filters.score=.* is not a pair of a key and a condition"),
        ([[[], "> 1"]], r"\[\] is not the name of a key in the samples' json"),
        ([[3, "> 1"]], "3 is not the name of a key"),
        ([["a", "> 1"], ["b", "a.b"]], r"data.row_filters\[1\]: 'a.b' is refused at character 1"),
    ],
)
def test_another_form_is_refused_when_the_source_is_made(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tars.webdataset("a.tar", row_filters=given)


def test_samples_that_fail_or_lack_a_key_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tars.webdataset(scored(tmp_path), row_filters=[["score", "> 4.5"], [["score", "size"], "score > size"]])
    with caplog.at_level(logging.INFO):
        index = source.open()
    assert index.keys.tolist() == [b"0001", b"0002", b"0004"]
    assert [source.read(row).caption for row in range(3)] == ["picture 1", "picture 2", "picture 4"]
    assert "data.row_filters keep 3 of 7 samples (42.9%); 1 have no readable json" in caplog.text
    assert "data.row_filters score: > 4.5: 3 pass (42.9%), 1 lack the key" in caplog.text
    assert "data.row_filters score, size: score > size: 4 pass (57.1%), 1 lack the key" in caplog.text


def test_no_sample_left_is_refused_with_the_pass_rates(tmp_path: Path) -> None:
    source = tars.webdataset(scored(tmp_path), row_filters={"score": "> 100", "sise": "> 1"})
    with pytest.raises(
        ConfigError, match=r"row_filters leave no sample, .*score: > 100: 0 pass .*sise: > 1: 0 pass .*7 lack"
    ):
        source.open()


def test_the_json_is_read_once_for_the_same_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = scored(tmp_path)
    first = tars.webdataset(path, row_filters={"score": "> 4.5"}).open()
    judged = []
    judge = tar_index.judge_shard
    monkeypatch.setattr(tar_index, "judge_shard", lambda *given: judged.append(given) or judge(*given))
    assert tars.webdataset(path, row_filters={"score": "> 4.5"}).open().digest == first.digest
    assert not judged
    assert tars.webdataset(path, row_filters={"score": "> 5.5"}).open().digest != first.digest
    assert len(judged) == 1


def test_damaged_verdicts_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = scored(tmp_path)
    first = tars.webdataset(path, row_filters={"score": "> 4.5"}).open()
    (kept,) = (tmp_path / ".cascade_train_index").glob("*-filters-*.npz")
    kept.write_bytes(b"damaged")
    assert tars.webdataset(path, row_filters={"score": "> 4.5"}).open().digest == first.digest
    assert f"cached index {kept} is damaged" in caplog.text


def test_changed_filters_are_refused_on_resume_even_if_they_keep_the_same_samples(tmp_path: Path) -> None:
    path = scored(tmp_path)
    with loading(tars.webdataset(path, row_filters={"score": "> 4.5"})) as loader:
        state = loader.state_dict()
    with loading(tars.webdataset(path, row_filters={"score": "> 4.5"})) as loader:
        loader.load_state_dict(state)
    for other in ({"score": "> 4.25"}, None):
        with (
            loading(tars.webdataset(path, row_filters=other)) as loader,
            pytest.raises(
                ConfigError,
                match="position does not fit this run.s data: filters was .*: data.row_filters changed; set it back",
            ),
        ):
            loader.load_state_dict(state)


def test_a_tar_that_cannot_be_judged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = scored(tmp_path)

    def refuse(*given: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(tar_index, "judge_shard", refuse)
    with pytest.raises(RunError, match="a tar cannot be read: .* Permission denied: '.*a.tar'"):
        tars.webdataset(path, row_filters={"score": "> 4.5"}).open()
