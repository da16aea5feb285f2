"""Who is named when the exchange with other ranks breaks; the whole of it is in tests/distributed/test_stopping.py."""

import socket

import pytest
import torch.distributed as dist

from cascade_train.distributed import lost_ranks as module
from cascade_train.distributed.lost_ranks import Heartbeat
from cascade_train.errors import ConfigError, Interrupted, RankLostError, RunError

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:40879"
SLOW = "[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


@pytest.fixture
def store(monkeypatch):
    """The notes of other ranks."""
    store = dist.HashStore()
    monkeypatch.setattr(module, "_get_default_store", lambda: store)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.0)
    return store


def called(rank, ranks=3):
    return Heartbeat(rank=rank, ranks=ranks, timeout_seconds=5)


@pytest.mark.parametrize("text", [LOST, SLOW])
@pytest.mark.parametrize(("rank", "shared"), [(0, False), (2, True)])
def test_a_rank_that_does_not_answer_is_named_by_the_lowest_that_does(store, text, rank, shared):
    store.set("step_of_1", "120 0.0 a.example")
    store.set(f"answer_of_{2 - rank}", "")
    match = rf"Ranks are lost: rank 1 on a\.example \(in step 120, begun \d+ s ago\); rank {rank} is in step 0"
    with pytest.raises(RankLostError, match=match) as named, called(rank).naming_lost_ranks():
        raise RuntimeError(text)
    assert named.value.shared is shared


def test_a_rank_before_its_first_step_is_named_too(store):
    with (
        pytest.raises(RankLostError, match=r"rank 1 \(before its first step\), rank 2 \("),
        called(0).naming_lost_ranks(),
    ):
        raise RuntimeError(LOST)


def test_many_lost_ranks_are_counted(store):
    with pytest.raises(RankLostError, match=r"rank 8 .*, and 3 more; rank 0"), called(0, ranks=12).naming_lost_ranks():
        raise RuntimeError(LOST)


def test_notes_that_are_gone_with_the_rank_that_kept_them_are_said_to_be(monkeypatch):
    class Gone:
        def check(self, *arguments):
            raise dist.DistNetworkError("Connection was likely closed")

        compare_set = check

    monkeypatch.setattr(module, "_get_default_store", Gone)
    with pytest.raises(RankLostError, match=r"^Rank 0 has ended.*; rank 1 is in step 0"), called(1).naming_lost_ranks():
        raise RuntimeError(LOST)
    leave(2, ConfigError("the word finds no store"))


@pytest.mark.parametrize("text", ["a defect", LOST])
def test_other_errors_and_losses_of_nobody_stay_as_they_are(store, text):
    if text == LOST:
        store.set("answer_of_1", "")
        store.set("answer_of_2", "")
    with pytest.raises(RuntimeError) as kept, called(0).naming_lost_ranks():
        raise RuntimeError(text)
    assert str(kept.value) == text
    assert not isinstance(kept.value, RankLostError)


def test_steps_are_noted_and_alone_nothing_is(store, monkeypatch):
    waits = []
    monkeypatch.setattr(module, "set_timeout", lambda groups, seconds: waits.append(seconds))
    several = called(1)
    for step in (7, 8):
        with several.step(step, []):
            assert store.get("step_of_1").decode().startswith(f"{step} ")
    assert store.get("step_of_1").decode().endswith(socket.gethostname())
    assert waits == [7200.0, 5, 7200.0], "the first step may take its time"
    with called(0, ranks=1).step(1, []):
        assert not store.check(["step_of_0"])


def leave(rank, error, ranks=3):
    with pytest.raises(type(error)), called(rank, ranks).reporting_errors():
        raise error


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (ConfigError("data.urls=a.tar is not there."), "data.urls=a.tar is not there.", 2),
        (RunError("the disk is full"), "the disk is full", 1),
        (KeyError("defect"), r"KeyError\('defect'\)", 1),
        (Interrupted("Stopped by SIGTERM before the first step.", code=75), "Stopped by SIGTERM before", 75),
    ],
    ids=["refused", "the world", "a defect", "stopped"],
)
@pytest.mark.parametrize(("rank", "shared"), [(0, False), (2, True)])
def test_the_rank_that_ended_the_run_is_named_with_what_it_said(store, error, text, code, rank, shared):
    leave(1, error)
    leave(2, RunError("a consequence"))
    match = rf"^Rank 1 on {socket.gethostname()} ended the run before the first step: {text}"
    with pytest.raises(RankLostError, match=match) as named, called(rank).naming_lost_ranks():
        raise RuntimeError(LOST)
    assert (named.value.code, named.value.shared) == (code, shared)
