"""Which checkpoints stay, and why; and every kind of damage is found and named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from cascade_train.engine.checkpoint import folder as module
from cascade_train.engine.checkpoint.folder import (
    CheckpointFolder,
    FileRecord,
    Manifest,
    Retention,
    best_value,
    find_fault,
    hash_file,
    last_logged,
    read_manifest,
    write_manifest,
)
from cascade_train.errors import ConfigError, RunError


def manifest(step, value=None):
    best = {} if value is None else {"best": {"metric": "validate/loss", "value": value, "step": step}}
    return Manifest(step=step, files={}, facts=best)


def kept(rule, manifests):
    return [step for step, reasons in rule.reasons({each.step: each for each in manifests}).items() if reasons]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": 2}, [8, 10]),
        ({"keep_last": 1, "keep_every_steps": 4}, [4, 8, 10]),
        ({"keep_every_steps": 4}, [2, 4, 6, 8, 10]),
    ],
)
def test_the_last_and_every_so_many_stay(rule, expected):
    assert kept(Retention(**rule), [manifest(step) for step in (10, 8, 6, 4, 2)]) == expected


@pytest.mark.parametrize(("mode", "expected"), [("min", [3, 5, 6]), ("max", [1, 2, 6])])
def test_the_best_by_a_metric_stay_and_of_equals_the_later(mode, expected):
    values = {1: 0.9, 2: 0.9, 3: 0.1, 4: 0.2, 5: 0.2, 6: 0.5}
    rule = Retention(keep_last=1, keep_best=2, best_metric="validate/loss", best_mode=mode)
    assert kept(rule, [manifest(step, value) for step, value in values.items()]) == expected


def test_every_reason_is_told():
    rule = Retention(keep_last=1, keep_every_steps=2, keep_best=1, best_metric="validate/loss")
    manifests = {1: manifest(1), 2: manifest(2, 0.5), 3: manifest(3)}
    assert rule.reasons(manifests) == {1: [], 2: ["every 2", "number 1 by validate/loss"], 3: ["newest 1"]}


@pytest.mark.parametrize("key", ["keep_last", "keep_every_steps", "keep_best"])
def test_a_number_below_one_is_refused(key):
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}=0 must be at least 1, or null to switch it off"):
        Retention(**{key: 0})


def test_the_last_value_logged_up_to_a_step_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "loss": n / 2, **({"validate/loss": n * 1.0} if n % 3 == 0 else {})} for n in range(1, 9)]
    rows[6]["loss"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_logged(path, "validate/loss", step=8) == {"metric": "validate/loss", "value": 6.0, "step": 6}
    assert last_logged(path, "validate/loss", step=5) == {"metric": "validate/loss", "value": 3.0, "step": 3}
    assert last_logged(path, "loss", step=7) == {"metric": "loss", "value": 3.0, "step": 6}
    assert last_logged(path, "validate/loss", step=2) is None
    assert last_logged(path, "psnr", step=8) is None


def test_a_line_that_is_being_appended_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": "2", "loss": 0.5}\n{"loss": 0.5}\n{"step": 2, "loss": 0.')
    assert last_logged(path, "loss", step=2) == {"metric": "loss", "value": 0.5, "step": 1}


def test_a_leftover_that_cannot_be_deleted_holds_up_no_save(tmp_path, monkeypatch):
    folder, unlink, busy = CheckpointFolder(tmp_path), os.unlink, ".nfs1"

    def refuse(path, **where):
        if str(path).endswith(busy):
            raise OSError(16, "Device or resource busy")
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", refuse)
    for step, kind in ((1, "deleting"), (2, "saving")):
        folder.hidden(step, kind).mkdir()
        (folder.hidden(step, kind) / f".nfs{step}").touch()
    folder.prepare(folder.hidden(2, "saving"))
    assert list(folder.hidden(2, "saving").iterdir()) == []
    with pytest.raises(OSError, match="busy"):
        folder.prepare(folder.hidden(1, "deleting"))


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
    with pytest.raises(RunError, match=r"manifest\.json is missing or damaged: "):
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


def test_a_manifest_that_names_files_outside_its_folder_is_a_run_error(directory):
    body = {"format_version": 1, "step": 3, "files": {"../a.bin": {"size": 1, "sha256": "0"}}, "facts": {}}
    (directory / "manifest.json").write_text(json.dumps({**body, "sha256": module._digest(body)}))
    with pytest.raises(RunError, match="it names files outside its folder"):
        read_manifest(directory)


def test_the_best_by_an_evaluation_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4):
        folder.path(step).mkdir(parents=True)
        write_manifest(folder.path(step), Manifest(step=step, files={}, facts={}))
    rule = Retention(keep_last=1, keep_best=1, best_metric="evaluate/fid")
    assert [s for s, reasons in rule.reasons(folder.complete()).items() if reasons] == [4], "none is judged yet"
    rows = [{"step": step, "evaluate/fid": fid} for step, fid in ((1, 9.0), (2, 5.0), (3, 7.0), (3, None), (1, 6.0))]
    damaged = ["null", "[4]", '{"evaluate/fid": 1.0}', '{"step": 4, "evaluate/fid": "1"}', '{"step": 4, "evalua']
    text = "\n".join([*map(json.dumps, rows), *damaged])
    (tmp_path / "evaluation.jsonl").write_text(text)
    found = folder.complete()
    assert [best_value(found[step], "evaluate/fid") for step in found] == [6.0, 5.0, 7.0, None]
    reasons = rule.reasons(found)
    assert reasons == {1: [], 2: ["number 1 by evaluate/fid"], 3: [], 4: ["newest 1"]}
    assert read_manifest(folder.path(2)).facts == {}, "the file is as it was saved"


def test_numbers_of_weights_that_a_later_save_replaced_do_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.path(1).mkdir(parents=True)

    def save(content: str) -> str:
        (folder.path(1) / "a").write_text(content)
        manifest = Manifest(step=1, files={"a": hash_file(folder.path(1) / "a")}, facts={})
        write_manifest(folder.path(1), manifest)
        return manifest.stamp

    def value() -> float | None:
        return best_value(folder.complete()[1], "evaluate/fid")

    before = save("first")
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"step": 1, "evaluate/fid": 3.0, "weights": before}))
    assert value() == 3.0
    assert save("second") != before
    assert value() is None
    save("first")
    assert value() == 3.0
