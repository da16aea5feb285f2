from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.index.row_filter import ABSENT, PASSED, RowFilters, parse_row_filters
from tests.unit.data import tars

SCORES = {0: 3.0, 1: 5.0, 2: 6.0, 3: None, 4: 9.0, 5: "high"}


def scored(folder: Path) -> Path:
    """Write a tar of seven samples with the scores above; the last has no json."""
    files = tars.samples(range(7))
    files += [(f"{key:04d}.json", json.dumps({"score": s, "size": key}).encode()) for key, s in SCORES.items()]
    return tars.write(folder / "a.tar", sorted(files))


NO_MAPPINGS = [None, b"{", b"[1]", b"\xff", b"[" * 200_000]


@pytest.mark.parametrize("metadata", NO_MAPPINGS)
def test_a_sample_without_readable_metadata_passes_no_filter(metadata: bytes | None) -> None:
    assert parse_row_filters([["score", "> 1"]]).verdicts(metadata) == [ABSENT, ABSENT]
    assert parse_row_filters([]).verdicts(metadata) == [ABSENT]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("score > 4", "must be a list of .key, condition. or a mapping of keys to conditions"),
        ([["score", 4]], r"data.row_filters\[0\]=.* is not a pair of a key and a condition"),
        ([[["a", "b"], "<=0.5"]], "a comparison without its left side is for one key, not 2"),
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


def test_the_json_is_read_once_for_the_same_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = scored(tmp_path)
    first = tars.webdataset(path, row_filters={"score": "> 4.5"}).open()
    judged = []
    judge = RowFilters.verdicts
    monkeypatch.setattr(RowFilters, "verdicts", lambda *given: judged.append(given) or judge(*given))
    assert tars.webdataset(path, row_filters={"score": "> 4.5"}).open().digest == first.digest
    assert not judged
    assert tars.webdataset(path, row_filters={"score": "> 5.5"}).open().digest != first.digest
    assert len(judged) == 7


TIMES_ITSELF = "x"
for _ in range(5):
    TIMES_ITSELF = f"({TIMES_ITSELF})**8"


def check(text: str, **values: Any) -> bool:
    (condition,) = parse_row_filters([[list(values), text]]).filters
    return condition.verdict(values) == PASSED


@pytest.mark.parametrize(
    ("text", "passes", "fails"),
    [
        ("lambda s: s > 4.5", 4.6, 4.5),
        ("<=0.5", 0.5, 0.51),
        (" >= 512", 512, 511),
        ("== 'en'", "en", "de"),
        ("in ['en', 'de']", "de", "fr"),
        ("not in ('en', 'de')", "fr", "de"),
        (">=0.2 and _ < 0.4", 0.2, 0.4),
        ("lambda s: s < 0.01 or s == 1", 1, 0.5),
        ("lambda s: 0.5 <= s / 2 <= 2", 1, 5),
        ("lambda s: -s + 1 // 1 < +2 - 3 % 2", 1, -1),
        ("lambda s: not s", 0, 3),
        ("lambda s: s is not None and s != ''", "a", None),
        ("lambda s: 'cat' in s", "a cat", "a dog"),
        ("lambda s: s ** 2 >= 600**2", 600, 599),
        ("x * 2 == 6", 3, 4),
        ("x", [0], []),
        ("lambda é: é == 'ü'", "ü", "u"),
    ],
)
def test_both_ways_of_writing_a_condition_are_understood(text: str, passes: Any, fails: Any) -> None:
    assert check(text, x=passes)
    assert not check(text, x=fails)


@pytest.mark.parametrize("value", [None, "4", [], {}, float("nan"), 10**200, float("inf")])
def test_what_cannot_be_computed_does_not_pass(value: Any) -> None:
    assert not check("lambda s: s * 2 > 1", s=value)


MALICIOUS = {
    "__import__('os').system('touch owned')": "at character 1 .*: calls are not allowed",
    "lambda s: s.__class__.__mro__": r"at character 11 \('s.__class__.__mro__'\): attributes are not allowed",
    "lambda s: len(s)": r"at character 11 \('len\(s\)'\): calls",
    "lambda s: s[0]": "subscripts are not allowed",
    "lambda s: 9**9**9": "an exponent must be a whole number from 0 to 8",
    "lambda s: os": r"at character 11 \('os'\): the name os is unknown",
    "lambda s, t: s": "the lambda must take 1 plain argument, one for each of x",
    "import os": r"at character 1 .*this is no expression",
    "-" * 900 + "1": "it is nested too deeply|this is no expression",
    TIMES_ITSELF + "**9": "an exponent must be a whole",
}


@pytest.mark.parametrize(("text", "reason"), MALICIOUS.items(), ids=itertools.count())
def test_anything_else_is_refused_with_the_place_of_the_fault(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"data.row_filters\[0\]: .* is refused at character \d+ .*") as refusal:
        parse_row_filters([["x", text]])
    refusal.match(reason)
