"""JSON and YAML from outside: what they say, or one kind of error, soon and whatever they hold."""

import os
from pathlib import Path

import pytest

from cascade_train.errors import ConfigError
from cascade_train.files.durable import to_yaml
from cascade_train.files.untrusted import (
    MAX_DEPTH,
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
    "a: " + "1:" * 10_000 + "1.5": "cannot be read .OverflowError",
    "a: !!timestamp x": "cannot be read .AttributeError",
    "a: 2001-99-99": "month must be in",
    "a: !!python/object/apply:os.getcwd []": "could not determine a constructor",
    "a: [1": "expected ',' or ']', but got '<stream end>', line 1",
    "{[1]: 2}": "unhashable",
    "a: b\n--- \nc: d": "but found another document",
    "\0": "ReaderError",
}


@pytest.mark.parametrize("text", BAD_YAML, ids=BAD_YAML.values())
def test_a_yaml_that_would_not_end_or_runs_code_is_one_error(text: str):
    with pytest.raises(ValueError, match=BAD_YAML[text]):
        read_yaml(text)


def test_the_structure_of_a_yaml_is_checked_without_its_values():
    check_yaml("a: 2001-99-99\nb: [1, {c: 1e-4}]")
    for text in (DOUBLED, "a: " + "[" * 10_000):
        with pytest.raises(ValueError, match=BAD_YAML[text]):
            check_yaml(text)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{"])
def test_a_json_that_cannot_be_read_is_one_error(text: str):
    with pytest.raises(ValueError, match=r"too deep|Exceeds the limit|Expecting"):
        read_json(text)


def test_plain_values_are_read_as_they_are():
    values = {"a": [1, 2.5, None, True, "x"], "b": {"c": {"d": []}}}
    assert read_json('{"a": [1, 2.5, null, true, "x"], "b": {"c": {"d": []}}}') == values
    assert read_yaml(b"a: [1, 2.5, null, true, x]\nb: {c: {d: []}}") == values
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)


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
