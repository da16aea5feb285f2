"""Saving beside the loop: what it waits for, what it leaves, and how it fails."""

import gc
import logging
import os
import shutil
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from cascade_train.distributed.process_group import process_group
from cascade_train.engine.checkpoint import writing as checkpoint_writing
from cascade_train.engine.checkpoint.folder import Retention, find_fault, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.checkpoint.writing import Background
from cascade_train.errors import RunError

FORKS = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
"""Python 3.12 warns of what is tested here."""


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=generator)
    return {
        "weight": weight,
        "half": weight.bfloat16(),
        "view": weight[3:5],
        "group": {"lr": 0.1, "betas": [0.9, seed]},
    }


@pytest.fixture
def store(world, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", retention=Retention(keep_last=2), asynchronous=True)
    yield store
    store.close()


@pytest.fixture
def gate(monkeypatch):
    """Hold the writing of tensors until the gate is opened."""
    gate, write_data = threading.Event(), FileSystemWriter.write_data

    def slowed(self, plan, planner):
        assert gate.wait(60)
        return write_data(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", slowed)
    yield gate
    gate.set()


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_training_goes_on_while_the_state_of_then_is_written(store, gate):
    live, facts = state(1), {"step": 1, "data": {"position": 5}}
    path = store.save(1, live, facts)
    live["weight"].zero_()
    live["group"]["lr"], live["group"]["betas"][1] = 9.0, 9
    facts["data"]["position"] = 9
    assert not store.failed
    assert names(store) == [".step_1.saving"]
    assert store.newest() is None
    so_far = store.save_seconds
    assert 0.0 < so_far < 60.0
    gate.set()
    store.wait()
    assert store.save_seconds == store.save_seconds > so_far, "the clock stops with the save"
    loaded = state(2)
    assert store.load(path, loaded) == {"step": 1, "data": {"position": 5}}
    assert all(torch.equal(loaded[key], state(1)[key]) for key in ("weight", "half", "view"))
    assert loaded["group"] == {"lr": 0.1, "betas": [0.9, 1]}


def test_a_save_waits_for_the_one_in_flight_instead_of_doubling_it(store, gate):
    store.save(1, state(1), {})
    threading.Timer(0.3, gate.set).start()
    store.save(2, state(2), {})
    assert store.steps()[:1] == [1], "the first was published before the second was copied"
    store.wait()
    assert names(store) == ["step_1", "step_2"]
    for step in (1, 2):
        loaded = state(9)
        store.load(store.directory / f"step_{step}", loaded)
        assert torch.equal(loaded["weight"], state(step)["weight"])
    store.save(3, state(3), {})
    store.wait()
    assert names(store) == ["step_2", "step_3"], "retention is applied by the thread too"


def test_both_ways_of_saving_write_the_same_bytes(store, tmp_path):
    path = store.save(1, state(1), {"step": 1})
    store.wait()
    other = CheckpointStore(tmp_path / "waiting").save(1, state(1), {"step": 1})
    assert (path / "__0_0.distcp").read_bytes() == (other / "__0_0.distcp").read_bytes()
    assert read_manifest(path).facts == read_manifest(other).facts


def test_a_failure_is_known_at_once_and_raised_when_waited_for(store, monkeypatch, gate):
    store.save(1, state(1), {})
    gate.set()
    store.wait()

    def full(self, plan, planner):
        assert gate.wait(60)
        raise OSError(28, "No space left on device")

    gate.clear()
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    store.save(2, state(2), {})
    assert not store.failed
    gate.set()
    store._in_flight.exception(60)
    assert store.failed
    with pytest.raises(RunError, match="a checkpoint could not be written to .*No space left on device"):
        store.wait()
    assert not store.failed
    assert names(store) == ["step_1"]
    store.wait()


def test_an_end_by_another_error_still_publishes_what_was_in_flight(store, gate):
    store.save(1, state(1), {})
    threading.Timer(0.2, gate.set).start()
    store.close()
    assert store.newest() == store.directory / "step_1"


def test_an_end_by_another_error_says_what_was_lost(store, monkeypatch, caplog):
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    store.save(1, state(1), {})
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "the checkpoint that was being written is lost: a checkpoint could not be written" in caplog.text


@FORKS
def test_children_forked_during_a_write_do_not_disturb_it(store, monkeypatch):
    """The loop's thread forks, as it does for data workers: a fork destroys what other threads keep for themselves."""
    write_item = checkpoint_writing.Snapshot.resolve_data
    writing, forked, ends = threading.Event(), threading.Event(), []

    def held(self, item):
        writing.set()
        assert forked.wait(60)
        return write_item(self, item)

    monkeypatch.setattr(checkpoint_writing.Snapshot, "resolve_data", held)
    path = store.save(1, state(1), {})
    assert writing.wait(60)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            gc.freeze()  # as data workers do: groups of before the fork are not theirs to destroy
            torch.ones(4).sum()
            os._exit(0)
        ends.append(os.waitpid(child, 0)[1])
    assert not path.exists(), "the write goes on"
    forked.set()
    store.wait()
    assert ends == [0] * 5
    assert find_fault(path) is None
    loaded = state(2)
    store.load(path, loaded)
    assert torch.equal(loaded["weight"], state(1)["weight"])


def save_twice_and_linger(directory, gate, told):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = CheckpointStore(directory, asynchronous=True)
    gate.set()
    store.save(1, state(1), {})
    store.wait()
    gate.clear()
    store.save(2, state(2), {})
    os.write(told, b".")
    signal.pause()


@FORKS
def test_a_kill_during_the_write_leaves_the_older_checkpoint_newest(tmp_path, gate):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_twice_and_linger(tmp_path / "checkpoints", gate, writing)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with process_group():
        store = CheckpointStore(tmp_path / "checkpoints")
        assert names(store) == [".step_2.saving", "step_1"]
        assert store.newest() == store.directory / "step_1"
        gate.set()
        store.save(3, state(3), {})
        assert names(store) == ["step_1", "step_3"]


def test_fifty_runs_end_in_order_with_a_save_in_flight_till_the_end(tmp_path):
    before = threading.active_count()
    for number in range(50):
        with process_group():
            store = CheckpointStore(tmp_path / str(number), asynchronous=True)
            store.save(1, state(1), {})
            if number % 2:
                store.wait()
            store.close()
            assert store.newest() is not None
    assert threading.active_count() == before


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_byte_is_written(store, monkeypatch):
    store.save(1, state(1), {})
    store.wait()
    usage = shutil.disk_usage(store.directory)._replace(free=2**20 + 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RunError, match=r"a checkpoint of 0\.001 GiB does not fit in .*nothing was written\. Remedy"):
        store.save(2, state(2), {})
    assert names(store) == ["step_1"]
    assert not store.failed


def test_a_piece_that_is_done_holds_no_memory_while_the_thread_waits():
    background, held = Background(name="beside"), torch.ones(3)
    piece, seen = background.begin(lambda held=held: held.sum()), weakref.ref(held)
    piece.result()
    del held
    deadline = time.monotonic() + 60
    while seen() is not None and time.monotonic() < deadline:  # the result comes just before
        time.sleep(0.01)
    assert seen() is None
    background.end()


def test_a_piece_that_fails_is_told_to_who_waits_and_the_next_is_done():
    background, opened = Background(name="beside"), threading.Event()

    def fail():
        assert opened.wait(60)
        raise ValueError("no room")

    failing, next_one = background.begin(fail), background.begin(opened.is_set)
    assert not failing.done()
    opened.set()
    with pytest.raises(ValueError, match="no room"):
        failing.result()
    next_one.result()
    background.end()
