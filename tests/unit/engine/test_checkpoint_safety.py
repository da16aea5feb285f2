"""A checkpoint from a stranger: nothing in it is run, and what it cannot hold is refused."""

import dataclasses
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from cascade_train.engine.checkpoint.folder import hash_file, read_manifest, write_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.checkpoint.writing import Snapshot
from cascade_train.errors import RunError


class WritesAFile:
    """What a harmful pickle does, without the harm."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def state(plain=0.5):
    return {"weight": torch.arange(6.0), "lr": plain, "betas": (0.9, 0.99), "none": None, "name": "adam"}


def rehash(path):
    """Make the manifest fit the files, as a stranger can."""
    files = {each.name: hash_file(each) for each in path.iterdir() if each.name != "manifest.json"}
    write_manifest(path, dataclasses.replace(read_manifest(path), files=files))


@pytest.fixture
def store(world, tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def test_code_in_the_table_of_contents_is_refused_and_not_run(store, tmp_path):
    path, harm = store.save(1, state(), {}), tmp_path / "harm"
    (path / ".metadata").write_bytes(pickle.dumps(WritesAFile(harm)))
    rehash(path)
    assert store.newest() == path, "hashes alone do not tell"
    with pytest.raises(
        RunError, match=r"it names builtins\.exec\. It is no table of contents of a checkpoint: do not use"
    ):
        store.load(path, state())
    assert not harm.exists()


def test_a_table_of_a_newer_torch_is_told_from_harm(store, monkeypatch):
    path = store.save(1, state(), {})

    def of_five_fields(self, fields):  # as torch 2.11, which a table of torch 2.15 has six for
        (_, _, _, _, _) = (*fields, None)

    monkeypatch.setattr(TensorProperties, "__setstate__", of_five_fields)
    with pytest.raises(RunError, match=r"expected 5\)\. Unless a newer torch than \S+ has written it: It is no table"):
        store.load(path, state())


def test_code_inside_a_real_table_is_refused_and_not_run(store, tmp_path):
    path, harm = store.save(1, state(), {}), tmp_path / "harm"
    table = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(table, planner_data=WritesAFile(harm))))
    rehash(path)
    with pytest.raises(RunError, match=r"it names builtins\.exec"):
        store.load(path, state())
    assert not harm.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", pickle.dumps(Metadata({}, storage_data={})) + b"x", b"junk"])
def test_what_is_no_table_of_contents_is_refused(store, content):
    path = store.save(1, state(), {})
    (path / ".metadata").write_bytes(content)
    with pytest.raises((RunError, ValueError), match="is refused|another model"):
        store.load(path, state())


def test_code_in_a_plain_value_is_refused_and_not_run(store, tmp_path, monkeypatch):
    harm = tmp_path / "harm"

    def unchecked(self, item, value):
        if item.index.fqn != "lr":
            return DefaultSavePlanner.transform_object(self, item, value)
        written = io.BytesIO()
        torch.save(WritesAFile(harm), written)
        return written

    monkeypatch.setattr(Snapshot, "transform_object", unchecked)
    path = store.save(1, state(), {})
    with pytest.raises(RunError, match="lr in .*step_1 is refused: it is more than a plain value"):
        store.load(path, state())
    assert not harm.exists()


def test_what_would_not_load_is_not_saved(store):
    with pytest.raises(RunError, match="lr cannot be saved: only numbers, strings, None and tensors"):
        store.save(1, state(plain=WritesAFile("/nowhere")), {})
    assert list(store.directory.iterdir()) == []
