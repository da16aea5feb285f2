"""Checkpoints on one rank: whole, verified, exact, kept and dropped by rule."""

import logging
import shutil

import pytest
import torch

from cascade_train.engine.checkpoint import store as module
from cascade_train.engine.checkpoint.folder import Retention, find_fault, read_manifest
from cascade_train.engine.checkpoint.loading import read_table
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.errors import ConfigError, RunError


def state(seed=0, width=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(4, width, generator=generator),
            "half": torch.randn(5, generator=generator).bfloat16(),
        },
        "optimizer": {"step": torch.tensor(7.0), "param_groups": {"lr": 0.1 + 0.2, "betas": (0.9, 0.999)}},
        "empty": {},
    }


FACTS = {"step": 3, "samples_seen": 24, "loss": 0.1 + 0.2, "finished": False, "data": {"position": 5}, "id": None}


@pytest.fixture
def store(world, tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def damage(path):
    file = max(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    return file.name


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_a_saved_state_loads_exactly(store):
    path = store.save(3, state(), FACTS)
    assert path == store.directory / "step_3"
    loaded = state(seed=1)
    loaded["optimizer"]["param_groups"]["lr"] = 0.0
    weight = loaded["model"]["weight"]
    assert store.load(path, loaded) == FACTS
    assert torch.equal(weight, state()["model"]["weight"]), "the tensor that was given"
    assert torch.equal(loaded["model"]["half"], state()["model"]["half"])
    assert loaded["optimizer"]["param_groups"] == {"lr": 0.1 + 0.2, "betas": (0.9, 0.999)}


def test_equal_states_become_equal_files(store, tmp_path):
    first = store.save(3, state(), FACTS)
    found = {each.name: each.read_bytes() for each in first.iterdir()}
    assert str(tmp_path).encode() not in found[".metadata"]
    other = tmp_path / "elsewhere"
    first.rename(other)
    again = store.save(3, state(), FACTS)
    assert {each.name: each.read_bytes() for each in again.iterdir()} == found


def test_newest_is_the_highest_step_that_verifies(store, caplog):
    assert store.newest() is None
    for step in (9, 10):
        store.save(step, state(), FACTS)
    assert store.newest() == store.directory / "step_10"
    name = damage(store.directory / "step_10")
    with caplog.at_level(logging.WARNING):
        assert store.newest() == store.directory / "step_9"
    assert f"step_10 is damaged and skipped: {name} does not match the hash in its manifest" in caplog.text
    assert store.steps() == [9, 10]


def test_loading_a_checkpoint_without_manifest_is_a_run_error(store):
    path = store.save(3, state(), FACTS)
    (path / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json is missing or damaged"):
        store.load(path, state())


def test_loading_a_damaged_file_is_a_run_error(store):
    path = store.save(3, state(), FACTS)
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(RunError, match="step_3 could not be loaded: FileNotFoundError"):
        store.load(path, state())


def test_another_shape_is_refused_with_both_shapes(store):
    path = store.save(3, state(), FACTS)
    with pytest.raises(
        ConfigError,
        match=r"is a checkpoint of another model: model\.weight is torch\.float32 \(4, 3\) there and "
        r"torch\.float32 \(4, 2\) in this run \(1 keys differ\)",
    ):
        store.load(path, state(width=2))


def test_another_key_or_kind_or_dtype_is_refused_and_nothing_is_loaded(store):
    path = store.save(3, state(), FACTS)
    more = state(seed=1)
    more["model"]["added"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"model\.added is absent there and torch\.float32 \(2,\) in this run"):
        store.load(path, more)
    assert torch.equal(more["model"]["weight"], state(seed=1)["model"]["weight"])
    fewer = state()
    del fewer["model"]["half"]
    with pytest.raises(ConfigError, match=r"model\.half is torch\.bfloat16 \(5,\) there and absent in this run"):
        store.load(path, fewer)
    kind = state()
    kind["optimizer"]["step"] = 7.0
    with pytest.raises(ConfigError, match=r"optimizer\.step is torch\.float32 \(\) there and a plain value"):
        store.load(path, kind)
    dtype = state()
    dtype["model"]["half"] = dtype["model"]["half"].float()
    with pytest.raises(ConfigError, match=r"model\.half is torch\.bfloat16 \(5,\) there and torch\.float32 \(5,\)"):
        store.load(path, dtype)


def test_retention_never_deletes_the_newest_that_verifies(world, tmp_path):
    keep_all = CheckpointStore(tmp_path)
    for step in (4, 8, 12):
        keep_all.save(step, state(), {})
    (tmp_path / "step_8" / "manifest.json").unlink()
    (tmp_path / "step_12" / "manifest.json").unlink()
    CheckpointStore(tmp_path, retention=Retention(keep_last=1)).save(6, state(), {})
    assert keep_all.steps() == [6, 8, 12]
    assert keep_all.newest() == tmp_path / "step_6"


def test_what_cannot_be_deleted_does_not_fail_the_save(world, tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=1))
    store.save(1, state(), {})
    monkeypatch.setattr(shutil, "rmtree", raise_for_deleting(shutil.rmtree))
    assert store.save(2, state(), {}).name == "step_2"
    assert "the old checkpoint of step 1 could not be deleted: busy" in caplog.text


def raise_for_deleting(rmtree):
    def broken(path, *args, **kwargs):
        if path.name.endswith(".deleting"):
            raise OSError("busy")
        rmtree(path, *args, **kwargs)

    return broken


def test_a_folder_that_cannot_be_written_is_a_run_error_with_its_remedy(store):
    store.directory.parent.mkdir()
    store.directory.touch()
    with pytest.raises(RunError, match=r"no checkpoint can be written to .*: .*File exists.* Remedy: make it writable"):
        store.save(1, state(), FACTS)


def test_a_file_that_rank_zero_cannot_see_is_a_run_error(store, monkeypatch):
    record = module.FileRecord(size=1, sha256="0")
    monkeypatch.setattr(module, "_own_records", lambda hidden: {"__1_0.distcp": record})
    with pytest.raises(RunError, match=r"__1_0\.distcp of another rank is not visible to rank 0: all ranks must share"):
        store.save(2, state(), FACTS)


def test_a_table_of_contents_is_required(store):
    path = store.save(3, state(), FACTS)
    (path / ".metadata").unlink()
    with pytest.raises(RunError, match="step_3 has no table of contents"):
        store.load(path, state())


def test_a_table_of_contents_names_only_files_of_the_manifest(store):
    path = store.save(3, state(), FACTS)
    manifest = read_manifest(path)
    manifest.files.pop("__0_0.distcp")
    with pytest.raises(RunError, match="names files that the manifest does not know"):
        read_table(path, manifest)


def test_leftovers_of_a_crashed_save_are_invisible_and_removed_at_the_next(store):
    store.save(1, state(), FACTS)
    for name in (".step_2.saving", ".step_0.deleting", ".step_1.replaced"):
        shutil.copytree(store.directory / "step_1", store.directory / name)
    assert store.newest() == store.directory / "step_1"
    store.save(3, state(), FACTS)
    assert names(store) == ["step_1", "step_3"]


def test_saving_a_step_again_replaces_it(store):
    store.save(1, state(), {**FACTS, "finished": False})
    path = store.save(1, state(seed=1), {**FACTS, "finished": True})
    assert names(store) == ["step_1"]
    assert find_fault(path) is None
    assert read_manifest(path).facts["finished"] is True


def test_a_crash_while_replacing_a_step_loses_nothing(store):
    path = store.save(1, state(), FACTS)
    path.rename(store.directory / ".step_1.replaced")
    assert store.newest() == path
    assert names(store) == ["step_1"]


def test_foreign_names_are_left_alone(store):
    store.save(1, state(), FACTS)
    (store.directory / "step_best").mkdir()
    (store.directory / "notes.txt").write_text("mine")
    store.save(2, state(), FACTS)
    assert store.steps() == [1, 2]
    assert names(store) == ["notes.txt", "step_1", "step_2", "step_best"]
