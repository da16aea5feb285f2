"""The manifest: every kind of damage is found and named."""

import hashlib
import json

import pytest

from cascade_train.engine.checkpoint import folder as module
from cascade_train.engine.checkpoint.folder import (
    FileRecord,
    Manifest,
    find_fault,
    hash_file,
    read_manifest,
    write_manifest,
)
from cascade_train.errors import RunError

FACTS = {"samples_seen": 24, "loss": 0.1 + 0.2, "nested": {"a": [1, None]}}


@pytest.fixture
def directory(tmp_path):
    """A directory that verifies, with two files."""
    (tmp_path / "a.bin").write_bytes(b"abc" * 1000)
    (tmp_path / "b.bin").write_bytes(b"")
    files = {name: hash_file(tmp_path / name) for name in ("a.bin", "b.bin")}
    write_manifest(tmp_path, Manifest(step=3, files=files, facts=FACTS))
    return tmp_path


def test_a_manifest_reads_back_equal(directory):
    read = read_manifest(directory)
    assert (read.step, read.facts) == (3, FACTS)
    contents = {"a.bin": b"abc" * 1000, "b.bin": b""}
    records = {name: FileRecord(size=len(c), sha256=hashlib.sha256(c).hexdigest()) for name, c in contents.items()}
    assert read.files == records
    assert find_fault(directory) is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"abc", "a.bin has 3 bytes, its manifest says 3000"),
        (None, "a.bin cannot be read: No such file or directory"),
        (b"abd" * 1000, "a.bin does not match the hash in its manifest"),
    ],
)
def test_a_damaged_file_is_named_a_changed_byte_by_hashes_alone(directory, content, fault):
    (directory / "a.bin").unlink() if content is None else (directory / "a.bin").write_bytes(content)
    assert find_fault(directory) == fault
    assert find_fault(directory, hashes=False) == (None if "hash" in fault else fault)


@pytest.mark.parametrize("text", [None, "", '{"step": 3', "[]", "3", "{}", '{"sha256"'])
def test_a_manifest_that_cannot_be_read_is_a_run_error(directory, text):
    path = directory / "manifest.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json is missing or damaged"):
        read_manifest(directory)
    assert "manifest.json is missing or damaged" in find_fault(directory)


def test_a_manifest_that_was_edited_is_a_run_error(directory):
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"samples_seen": 24', '"samples_seen": 25'))
    with pytest.raises(RunError, match="does not match its own hash"):
        read_manifest(directory)


def test_a_manifest_of_another_format_is_a_run_error(directory, monkeypatch):
    kept = read_manifest(directory)
    monkeypatch.setattr(module, "FORMAT_VERSION", 99)
    write_manifest(directory, kept)
    monkeypatch.undo()
    assert json.loads((directory / "manifest.json").read_text())["format_version"] == 99
    with pytest.raises(RunError, match="has format version 99, this program reads 1"):
        read_manifest(directory)


def test_a_manifest_without_what_older_programs_did_not_write_has_its_optimizer_and_no_name(directory):
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    for key in ("has_optimizer", "name", "sha256"):
        del body[key]
    path.write_text(json.dumps({**body, "sha256": module._digest(body)}))
    read = read_manifest(directory)
    assert (read.has_optimizer, read.name) == (True, None)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../a.bin": {"size": 1, "sha256": "0"}}, "it names files outside its folder"),
        ({"a.bin": {"length": 1}}, "manifest.json is missing or damaged"),
        ([], "manifest.json is missing or damaged"),
        (None, "manifest.json is missing or damaged"),
    ],
)
def test_a_manifest_of_another_content_is_a_run_error(directory, files, said):
    body = {"format_version": 1, "step": 3, "files": files, "facts": {}}
    (directory / "manifest.json").write_text(json.dumps({**body, "sha256": module._digest(body)}))
    with pytest.raises(RunError, match=said):
        read_manifest(directory)


OTHER_TYPES = {
    "step": "3",
    "has_optimizer": 1,
    "name": 7,
    "files": {"a.bin": {"size": "3000", "sha256": "x"}},
    "facts": [],
    "facts.step": "3",
    "facts.samples_seen": None,
    "facts.finished": "no",
    "facts.data": 3,
    "facts.data.position": "3",
    "facts.losses": [],
    "facts.best": 3,
    "facts.best.value": "low",
    "facts.tracker_run_id": 5,
}


@pytest.mark.parametrize("key", OTHER_TYPES)
def test_values_of_another_type_are_damage_although_the_hash_is_right(directory, key):
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    body["facts"] |= {"data": {}, "best": {"metric": "loss"}}
    *nodes, name = key.split(".")
    node = body
    for each in nodes:
        node = node[each]
    node[name] = OTHER_TYPES[key]
    body["sha256"] = module._digest({name: value for name, value in body.items() if name != "sha256"})
    path.write_text(json.dumps(body))
    if key == "files":
        assert "has a size or a hash of another type" in find_fault(directory)
    assert key in find_fault(directory)
    with pytest.raises(RunError, match="is missing or damaged"):
        read_manifest(directory)
