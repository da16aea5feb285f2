"""Checkpoints and run directories on two ranks: no rank waits for one that failed, and ranks may change."""

import json

import pytest
import torch
import torch.distributed as dist

from cascade_train.engine.checkpoint.folder import find_fault, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from tests.distributed.test_modes import fork

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def plain(fill):
    weight, norm = torch.arange(21.0).reshape(7, 3) + fill, torch.arange(5.0) + fill
    return {"model": {"weight": weight, "norm": norm}, "optimizer": {"step": torch.ones(()), "lr": 0.1}}


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(one_rank, tmp_path_factory):
    """What two ranks left, beside a checkpoint that one rank made for them."""
    directory = tmp_path_factory.mktemp("ranks")
    CheckpointStore(directory / "one").save(4, plain(2), {})
    return fork(directory, {"two": (2, "checkpoint_worker.exercise_checkpoints", None)})


@pytest.fixture(params=[0, 1], ids=["rank_0", "rank_1"])
def seen(request, directory):
    return json.loads((directory / f"rank_{request.param}.json").read_text())


def test_two_ranks_save_and_load_exactly(seen):
    assert seen["saved"] == "step_4"
    assert seen["facts"] == {"step": 4, "samples_seen": 32, "finished": False}
    assert seen["same_ranks"]


def test_two_ranks_load_what_one_saved(seen):
    assert seen["from_one_rank"]


def test_one_rank_loads_what_two_saved(directory):
    store = CheckpointStore(directory / "two")
    state = plain(5)
    store.load(store.newest(), state)
    assert torch.equal(state["model"]["weight"], plain(0)["model"]["weight"])
    assert torch.equal(state["model"]["norm"], plain(0)["model"]["norm"])


def test_each_rank_hashes_its_own_files_into_one_manifest(directory):
    path = directory / "two" / "step_4"
    names = set(read_manifest(path).files)
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} == names
    assert find_fault(path) is None


@pytest.mark.parametrize("where", ["tensors_0", "tensors_1", "manifest"])
def test_a_full_disk_on_one_rank_reaches_all(seen, where):
    assert seen["broken"][where].startswith("RunError: ")
    assert "No space left on device" in seen["broken"][where]


def test_facts_that_differ_are_a_defect_on_all_ranks(seen):
    assert seen["broken"]["facts"].startswith("AssertionError: facts of step 6 differ between ranks")


def test_failed_saves_leave_only_what_retention_keeps(seen):
    assert seen["left"] == ["step_4"]


def test_another_model_is_refused_on_all_ranks(seen):
    assert "model.weight is torch.float32 (7, 3) there and torch.float32 (3,) in this run" in seen["other_model"]


def test_an_error_of_one_rank_reaches_all(seen):
    found = seen["outcomes"]
    assert found["zero"] == 0
    assert found["every"] == [0, 1]
    assert found["config"] == "ConfigError: a key"


def test_a_defect_keeps_its_traceback_where_it_happened(directory):
    defects = [json.loads((directory / f"rank_{r}.json").read_text())["outcomes"]["defect"] for r in (0, 1)]
    assert defects == ["RunError: rank 1: KeyError: 'a defect'", "KeyError: 'a defect'"]


def test_a_run_directory_is_claimed_once_and_known_to_all(seen):
    run = seen["run"]
    assert run["created"] == [True, False]
    assert run["resume_from"] == "step_2"
    assert "model.width: 4 -> 8" in run["other"]
