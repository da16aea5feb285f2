"""JSON and YAML from outside: what they say, or one kind of error, soon and whatever they hold."""

import json
import os
from pathlib import Path

import pytest

from cascade_train.engine.checkpoint.folder import FileRecord, Manifest, write_manifest
from cascade_train.errors import ConfigError
from cascade_train.files.durable import to_yaml
from cascade_train.files.untrusted import (
    LINE_BYTES,
    LINES_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    WHOLE_BYTES,
    check_yaml,
    open_regular,
    read_json,
    read_regular,
    read_yaml,
)

DOUBLED = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
BAD_YAML = {
    DOUBLED: "it has an alias, \\*a0; write out what it stands for",
    "a: &a {<<: *a}": "it has an alias",
    "a: " + "[" * 10_000: "it is nested deeper than 50 levels",
    "\n".join(" " * depth + "a:" for depth in range(200)): "it is nested deeper than 50 levels",
    "a: 0x" + "f" * 20_000: "a number of 20002 digits",
    "a: " + "1:" * 10_000 + "1.5": "cannot be read .OverflowError",
    "a: !!timestamp x": "cannot be read .AttributeError",
    "a: 2001-99-99": "month must be in",
    "a: !!python/object/apply:os.getcwd []": "could not determine a constructor",
    "a: [1": "expected ',' or ']', but got '<stream end>', line 1",
    "{[1]: 2}": "unhashable",
    "a: b\n--- \nc: d": "another document",
    "\0": "ReaderError",
}


@pytest.mark.parametrize("text", BAD_YAML, ids=BAD_YAML.values())
def test_a_yaml_that_would_not_end_is_one_error(text: str):
    with pytest.raises(ValueError, match=BAD_YAML[text]):
        read_yaml(text)


def test_the_structure_of_a_yaml_is_checked_without_its_values():
    check_yaml("a: 2001-99-99\nb: [1, {c: 1e-4}]")
    for text in (DOUBLED, "a: " + "[" * 10_000, "a: 0x" + "f" * 20_000):
        with pytest.raises(ValueError, match=BAD_YAML[text]):
            check_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "cannot be read .RecursionError|nested deeper"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "it is nested deeper than 50 levels"),
        ("9" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
    ],
)
def test_a_json_that_nothing_can_walk_through_is_one_error(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_json(text)


def test_a_json_that_does_not_fit_into_memory_is_one_error(monkeypatch: pytest.MonkeyPatch):
    def full(text: str) -> None:
        raise MemoryError

    monkeypatch.setattr("cascade_train.files.untrusted.json.loads", full)
    monkeypatch.setattr("cascade_train.files.untrusted.yaml.parse", lambda *_: full(""))
    with pytest.raises(ValueError, match="cannot be read .MemoryError"):
        read_json("1")
    with pytest.raises(ValueError, match="cannot be read .MemoryError"):
        read_yaml("1")


def test_plain_values_are_read_as_they_are():
    values = {"a": [1, 2.5, None, True, "x"], "b": {"c": {"d": []}}}
    assert read_json('{"a": [1, 2.5, null, true, "x"], "b": {"c": {"d": []}}}') == values
    assert read_yaml(b"a: [1, 2.5, null, true, x]\nb: {c: {d: []}}") == values
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_yaml(f"[{'9' * MAX_DIGITS}, {'x' * 2 * MAX_DIGITS}]") == [10**MAX_DIGITS - 1, "x" * 2 * MAX_DIGITS]


def test_only_regular_files_of_bounded_size_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"12345")
    for path in ("pipe", "."):
        with pytest.raises(ValueError, match="a pipe, a device or a folder"):
            open_regular(tmp_path / path, limit=4)
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        open_regular(tmp_path / "long", limit=4)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone is no regular file that can be read here .No such file"):
        read_regular(tmp_path / "gone")
    assert read_regular(tmp_path / "long", limit=5) == b"12345"


def test_half_a_character_of_utf_16_is_escaped():
    assert to_yaml({"a": "\ud800"}) == 'a: "\\uD800"\n'


def test_bounds_lie_ten_times_above_the_largest_legitimate_file(tmp_path: Path):
    record = FileRecord(size=10**10, sha256="0" * 64)
    files = {f"__{rank}_0.distcp": record for rank in range(10_000)}
    write_manifest(tmp_path, Manifest(step=10**6, files=files, facts={}))
    assert 10 * (tmp_path / "manifest.json").stat().st_size <= WHOLE_BYTES
    values = {f"name_{number}/grad_norm": 0.12345678901234567 for number in range(7)}
    assert 10 * 10**6 * len(json.dumps(values) + "\n") <= LINES_BYTES
    keys = [f"shards/{number:06d}.tar/{number:09d}" for number in range(8192)]
    assert 10 * len(json.dumps({"step": 10**6, "keys": keys})) <= LINE_BYTES
