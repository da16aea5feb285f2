from __future__ import annotations

import gzip
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.data.loading.stream_feed import InMemoryBatches
from cascade_train.data.sample import RawSample
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import feeding as streams
from tests.unit.data import tars
from tests.unit.data.dataset_contract import content
from tests.unit.data.feeding import SAMPLES, feeding, streamed

STEPS = 16  # of 6 samples: into the third epoch


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return streams.urls(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(urls: list[str]) -> list[str]:
    with feeding(streamed(urls)) as feed:
        return [content(next(feed)) for _ in range(STEPS)]


def drawn(urls: Any, steps: int, **options: Any) -> list[tuple[int, str]]:
    """Return epoch and key of every sample."""
    source = {name: options.pop(name) for name in list(options) if name in ("buffer_samples", "row_filters")}
    with feeding(streamed(urls, **source), **options) as feed:
        batches = [batch for _ in range(steps) for batch in next(feed)]
    return [pair for batch in batches for pair in zip(batch.epoch_B.tolist(), batch.keys, strict=True)]


def on_ranks(urls: Any, ranks: int, steps: int, **options: Any) -> list[list[tuple[int, str]]]:
    """Return epoch and key of every sample of each rank, which vote in threads."""
    votes, barrier = dict[int, Any](), Barrier(ranks, timeout=60)
    seen: list[list[tuple[int, str]]] = [[] for _ in range(ranks)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            votes[rank] = value
            barrier.wait()
            every = [votes[rank] for rank in range(ranks)]
            barrier.wait()
            return every

        try:
            with feeding(streamed(urls), rank=rank, ranks=ranks, gather=gather, **options) as feed:
                for _ in range(steps):
                    seen[rank] += [
                        pair for batch in next(feed) for pair in zip(batch.epoch_B.tolist(), batch.keys, strict=True)
                    ]
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_draws_samples_once_and_leaves_out_less_than_a_micro_batch_a_worker(
    urls: list[str], num_workers: int
) -> None:
    with feeding(streamed(urls, num_workers=num_workers)) as feed:
        batches = [batch for _ in range(20) for batch in next(feed)]
    seen = [pair for batch in batches for pair in zip(batch.epoch_B.tolist(), batch.keys, strict=True)]
    assert len(set(seen)) == len(seen)
    counts = Counter(epoch for epoch, _ in seen)
    assert all(SAMPLES - 6 - 2 < counts[epoch] <= SAMPLES for epoch in range(2))
    orders = [[key for epoch, key in seen if epoch == number] for number in range(2)]
    assert orders[0] != orders[1] != sorted(orders[1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_tars_of_unequal_length_and_end_an_epoch_together(urls: list[str], ranks: int) -> None:
    seen = on_ranks(urls, ranks, 12, micro_batch_size=1)
    assert [[epoch for epoch, _ in one] for one in seen] == [[epoch for epoch, _ in seen[0]]] * ranks
    every = [pair for one in seen for pair in one]
    assert len(set(every)) == len(every) == 72
    assert max(epoch for epoch, _ in every) >= 2
    tars_of = [{key.partition(":")[0] for epoch, key in one if epoch == 0} for one in seen]
    assert not tars_of[0] & tars_of[1], "whole tars are dealt where there are enough"


def test_one_compressed_tar_is_dealt_by_sample_to_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tars.write(tmp_path / "a.tar", tars.samples(range(13))).read_bytes()))
    seen = on_ranks([str(path)], 2, 6, global_batch_size=4, micro_batch_size=1)
    for epoch in range(2):
        parts = [[key for number, key in one if number == epoch] for one in seen]
        assert [len(part) for part in parts] == [6, 6]
        assert len({key for part in parts for key in part}) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_skips_what_was_seen_and_says_so(
    urls: list[str], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with feeding(streamed(urls, num_workers=num_workers)) as feed:
        states, expected = [feed.state_dict()], []
        for _ in range(STEPS):
            expected.append(content(next(feed)))
            states.append(feed.state_dict())
        for position in (0, 7, STEPS - 2, *random.Random(0).sample(range(1, STEPS - 1), 3)):
            feed.load_state_dict(json.loads(json.dumps(states[position])))
            assert content(next(feed)) == expected[position]
            assert feed.state_dict() == states[position + 1]
        feed.seek(0)
        assert content(next(feed)) == expected[0]
    assert "samples that were seen" in caplog.text


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ({"num_workers": 2}, {}),
        ({}, {"micro_batch_size": 6}),
        ({}, {"global_batch_size": 12}),
        ({"buffer_samples": 5}, {}),
    ],
)
def test_another_epoch_begins_where_other_readers_go_on(
    urls: list[str], source: dict[str, Any], asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with feeding(streamed(urls)) as feed:
        next(feed)
        state = feed.state_dict()
    with feeding(streamed(urls, **source), **asked) as feed:
        feed.load_state_dict(state)
        assert feed.position == 1
        assert {epoch for batch in next(feed) for epoch in batch.epoch_B.tolist()} == {1}
    assert "The streams begin epoch 1, since they changed" in caplog.text


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"row_filters": {"a": "> 1"}}, "filters was none, is"),
        ({"seed": 4}, "seed was 3, is 4"),
        ({"urls": 4}, "index"),
    ],
)
def test_a_place_in_other_streams_is_refused_or_followed_by_another_epoch(
    urls: list[str], options: dict[str, Any], changed: str
) -> None:
    with feeding(streamed(urls)) as feed:
        next(feed)
        state = feed.state_dict()
    asked = {"seed": options.get("seed", 3)}
    given, own = urls[: options.get("urls")], {name: options[name] for name in options if name == "row_filters"}
    with feeding(streamed(given, **own), **asked) as feed, pytest.raises(ConfigError, match=f"not fit .*{changed}"):
        feed.load_state_dict(state)
    with feeding(streamed(given, on_change="restart"), seed=4) as feed:
        feed.load_state_dict(state)
        assert {epoch for batch in next(feed) for epoch in batch.epoch_B.tolist()} == {1}


def test_a_killed_worker_ends_the_run_and_the_next_continues(urls, monkeypatch):
    with feeding(streamed(urls, num_workers=1)) as feed:
        expected = [content(next(feed)) for _ in range(STEPS)]
    left = [random.randrange(10, 30)]  # an epoch has workers of its own
    read = InMemoryBatches.read

    def read_or_die(self: InMemoryBatches, row: int) -> RawSample:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, row)

    with monkeypatch.context() as patch, feeding(streamed(urls, num_workers=1)) as feed:
        patch.setattr(InMemoryBatches, "read", read_or_die)
        with pytest.raises(RuntimeError, match="worker .* (killed by signal|exited unexpectedly)"):
            list(feed)
        place, state = feed.position, feed.state_dict()
    assert place >= 1
    with feeding(streamed(urls, num_workers=1)) as feed:
        feed.load_state_dict(state)
        assert content(next(feed)) == expected[place]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pipe_that_fails_in_the_middle_ends_the_run_with_its_last_line(tmp_path: Path, num_workers: int) -> None:
    paths = [tars.write(tmp_path / f"{n}.tar", tars.samples(range(10 * n, 10 * n + 10))) for n in range(2)]
    failing = f"pipe:head -c 12000 {paths[1]}; echo connection reset >&2; exit 3"
    with feeding(streamed([f"pipe:cat {paths[0]}", failing], num_workers=num_workers)) as feed:  # noqa: SIM117
        with pytest.raises(RunError, match="ended with code 3: connection reset"):
            list(feed)


def test_the_order_is_frozen(urls: list[str]) -> None:
    numbers = [int(key.rpartition(":")[2]) for _, key in drawn(urls, 3)]
    assert numbers == [6, 15, 14, 5, 10, 8, 9, 7, 12, 13, 11, 16, 18, 17, 20, 19, 23, 22]


def test_a_data_set_of_streams_shows_and_trains(urls: list[str]) -> None:
    data = open_data_set(streamed(urls), share=None, held_out=None)
    assert len(data.shown_batch(8, seed=3)) == 8
    feed = data.training_feed(seed=3, global_batch_size=6, micro_batch_size=6, rank=0, ranks=1)
    try:
        assert len(next(feed)[0]) == 6
    finally:
        data.close()
    held = open_data_set(streamed(urls), share=0.5, held_out=None)
    with pytest.raises(ConfigError, match="hold out by validate.urls of tars that can be indexed"):
        held.held_out_feed(seed=3, samples=4, micro_batch_size=2, rank=0, ranks=1)
