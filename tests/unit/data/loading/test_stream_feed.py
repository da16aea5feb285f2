from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.batch import Batch
from cascade_train.data.data_set import open_data_set
from cascade_train.data.loading.feed import FeedRequest
from cascade_train.data.loading.stream_feed import InMemoryBatches, largest_divisor, parts_of_rank
from cascade_train.data.sample import RawSample
from cascade_train.data.stream import StreamSpec
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import feeding as streams
from tests.unit.data import tars
from tests.unit.data.dataset_contract import check_form, content, loading
from tests.unit.data.feeding import SAMPLES, feeding, streamed

STEPS = 16  # of 6 samples: into the third epoch of each of 6 streams


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return streams.urls(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(urls: list[str]) -> list[str]:
    with feeding(streamed(urls)) as feed:
        return [content(next(feed)) for _ in range(STEPS)]


def drawn(urls: Any, steps: int, **options: Any) -> list[tuple[int, str]]:
    """Return epoch and key of every sample."""
    source = {name: options.pop(name) for name in list(options) if name in ("streams", "stream", "row_filters")}
    with feeding(streamed(urls, **source), **options) as feed:
        batches = [batch for _ in range(steps) for batch in next(feed)]
    return [pair for batch in batches for pair in zip(batch.epoch_B.tolist(), batch.keys, strict=True)]


def test_batches_have_the_documented_form(urls: list[str]) -> None:
    with feeding(streamed(urls)) as feed:
        step = next(feed)
        assert len(step) == feed.micro_batches == 3
        assert feed.position == 1
    check_form(step, 16)


@pytest.mark.parametrize("masked", ["ab", "a", "b", ""])
def test_samples_without_a_mask_count_everywhere(masked: str, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        mask = [(f"000{number}.mask.png", tars.mask())] if name in masked else []
        tars.write(tmp_path / f"{name}.tar", [*tars.samples([number]), *mask])
    given = [f"pipe:cat {tmp_path}/{name}.tar" for name in "ab"]
    with feeding(streamed(given, streams=2, crop="center"), global_batch_size=2) as feed:
        (batch,) = next(feed)
    if masked:
        pairs = zip(batch.captions, batch.tensors["mask"], strict=True)
        found = {"ab"[int(caption[-1])]: float(mask.float().mean()) for caption, mask in pairs}
        assert found == {name: 0.0 if name in masked else 255.0 for name in "ab"}
    else:
        assert "mask" not in batch.tensors


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_epoch_draws_every_sample_once(urls: list[str], count: int) -> None:
    seen = drawn(urls, 40, streams=count)
    for epoch in range(2):
        keys = [key for number, key in seen if number == epoch]
        assert len(keys) == len(set(keys)) == SAMPLES


def test_tars_move_between_streams_and_samples_mix_within_blocks(urls: list[str]) -> None:
    seen = drawn(urls, 40, streams=1, stream=StreamSpec(buffer_samples=100))
    first, second = ([key for epoch, key in seen if epoch == number] for number in range(2))
    assert first != second
    assert first != sorted(first)
    tars_in_order = list(dict.fromkeys(key.split(":")[0] for key in first[:6]))
    assert len(tars_in_order) > 1


@pytest.mark.parametrize(
    ("count", "ranks", "micro_batch_size", "num_workers"),
    [(6, 1, 6, 0), (6, 3, 2, 0), (6, 2, 3, 2), (2, 6, 1, 0), (2, 2, 1, 0), (2, 1, 3, 2)],
)
def test_ranks_and_workers_leave_the_global_batch_unchanged(urls, count, ranks, micro_batch_size, num_workers):
    with feeding(streamed(urls, streams=count)) as feed:
        expected = [content(next(feed)) for _ in range(4)]
    steps: list[list[Batch]] = [[], [], [], []]
    for rank in range(ranks):
        source = streamed(urls, streams=count, num_workers=num_workers)
        with feeding(source, rank=rank, ranks=ranks, micro_batch_size=micro_batch_size) as feed:
            for step in steps:
                step += next(feed)
    assert {len(micro) for step in steps for micro in step} == {micro_batch_size}
    assert [content(step) for step in steps] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_at_any_place_is_exact(urls: list[str], num_workers: int, uninterrupted: list[str]) -> None:
    with feeding(streamed(urls, num_workers=num_workers)) as feed:
        states = [feed.state_dict()]
        for expected in uninterrupted:
            assert content(next(feed)) == expected
            states.append(feed.state_dict())
        for position in (0, 7, STEPS - 2, *random.Random(0).sample(range(STEPS - 1), 2 if num_workers else 6)):
            feed.load_state_dict(json.loads(json.dumps(states[position])))
            assert content(next(feed)) == uninterrupted[position]
            assert feed.state_dict() == states[position + 1]
        feed.seek(0)
        assert content(next(feed)) == uninterrupted[0]


def test_ranks_put_their_places_together(urls: list[str], uninterrupted: list[str]) -> None:
    kept: dict[int, Any] = {}

    def gather(mine: Any) -> list[Any]:
        kept[len(kept)] = mine
        return list(kept.values())

    for rank in range(2):
        with feeding(streamed(urls), rank=rank, ranks=2, micro_batch_size=3, gather=gather) as feed:
            for _ in range(5):
                next(feed)
            state = feed.state_dict()
    step: list[Batch] = []
    for rank in range(3):
        with feeding(streamed(urls), rank=rank, ranks=3) as feed:
            feed.load_state_dict(state)
            step += next(feed)
    assert content(step) == uninterrupted[5]


def test_a_killed_worker_ends_the_run_and_the_next_continues(urls, uninterrupted, monkeypatch):
    left = [random.randrange(20, 80)]
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
    with feeding(streamed(urls)) as feed:
        feed.load_state_dict(state)
        assert content(next(feed)) == uninterrupted[place]


def test_the_order_is_frozen(urls: list[str]) -> None:
    numbers = [int(key.rpartition(":")[2]) for _, key in drawn(urls, 3)]
    assert numbers == [15, 5, 16, 35, 3, 31, 14, 8, 17, 36, 1, 30, 0, 6, 18, 38, 2, 29]


def test_an_unreadable_sample_has_a_stand_in_of_its_block(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(8), damaged=[2]))
    with feeding(streamed([f"pipe:cat {path}"]), global_batch_size=4) as feed:
        keys = [key for _ in range(2) for batch in next(feed) for key in batch.keys]
        assert len(keys) == 8
        assert len(set(keys)) == 7
        assert [each.name.rpartition(":")[2] for each in feed.skipped] == ["0002"]


def test_row_filters_choose_as_samples_are_read(tmp_path: Path) -> None:
    files = []
    for key in range(6):
        files += [*tars.samples([key]), (f"{key:04d}.json", json.dumps({"score": key}).encode())]
    path = tars.write(tmp_path / "a.tar", [*files, *tars.samples([9])])
    seen = drawn([f"pipe:cat {path}"], 3, row_filters={"score": "> 2"}, global_batch_size=3, micro_batch_size=3)
    keys = [key.rpartition(":")[2] for _, key in seen]
    assert [sorted(keys[at : at + 3]) for at in (0, 3, 6)] == [["0003", "0004", "0005"]] * 3
    with (
        feeding(streamed([f"pipe:cat {path}"], row_filters={"score": "> 8"})) as feed,
        pytest.raises(RunError, match=r"no sample of pipe:cat .*a.tar can be used in epoch 0"),
    ):
        next(feed)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"streams": 3}, "streams was 6, is 3"),
        ({"stream": StreamSpec(buffer_samples=5)}, "blocks was 4/64, is 5/64"),
        ({"row_filters": {"a": "> 1"}}, "filters was none, is"),
        ({"seed": 4}, "seed was 3, is 4"),
        ({"global_batch_size": 12}, "batch was 6, is 12"),
    ],
)
def test_a_place_in_other_streams_is_refused(urls: list[str], options: dict[str, Any], changed: str) -> None:
    with feeding(streamed(urls)) as feed:
        next(feed)
        state = feed.state_dict()
    asked = {name: options[name] for name in ("seed", "global_batch_size") if name in options}
    own = {name: value for name, value in options.items() if name not in asked}
    with feeding(streamed(urls, **own), **asked) as feed, pytest.raises(ConfigError, match=f"not fit .*{changed}"):
        feed.load_state_dict(state)


def test_another_epoch_begins_by_choice(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with feeding(streamed(urls)) as feed:
        next(feed)
        state = feed.state_dict()
    with feeding(streamed(urls[:4], streams=2, on_change="restart")) as feed:
        feed.load_state_dict(state)
        assert feed.position == 1
        assert {epoch for batch in next(feed) for epoch in batch.epoch_B.tolist()} == {1}
    assert "The streams begin epoch 1, since they changed: index was" in caplog.text


def test_a_position_in_an_index_is_no_place_in_streams(urls: list[str], tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(9)))
    with loading(tars.webdataset(path), global_batch_size=6) as loader:
        next(loader)
        state = loader.state_dict()
    with feeding(streamed(urls)) as feed, pytest.raises(ConfigError, match="does not fit this run: order was"):
        feed.load_state_dict(state)
    state["identity"] += " filters=size>512 score>0.5 seed=1"  # of two sources
    with feeding(streamed(urls, on_change="restart")) as feed:
        feed.load_state_dict(state)
        assert feed.position == 1
        assert {epoch for batch in next(feed) for epoch in batch.epoch_B.tolist()} == {1}


def test_lengths_are_not_known_and_single_samples_cannot_be_asked_for(urls: list[str]) -> None:
    source = streamed(urls)
    with feeding(source) as feed:
        with pytest.raises(ConfigError, match="data.urls are streams, whose length is unknown"):
            feed.steps_of_epochs(1)
        with pytest.raises(ConfigError, match="of which no single sample can be read: they stand alone as data"):
            source.read(0)
        (line,) = feed.report()
    assert "The data are 6 logical streams, since not all tars can be indexed" in line


@pytest.mark.parametrize(("count", "message"), [(4, "does not divide train.global"), (7, "more than the 6 tars")])
def test_a_number_of_streams_that_does_not_fit_is_refused(urls: list[str], count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message), feeding(streamed(urls, streams=count), global_batch_size=14):
        pass


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"aspect_ratios": [0.5], "image_size": 64}, "data.aspect_ratios=.*0.5"),
        ({"size_filters": {"width": "> 10"}}, "data.size_filters="),
        ({"quarantine": "runs/old"}, "data.quarantine=runs/old"),
    ],
)
def test_what_needs_an_index_is_refused(urls: list[str], options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.* needs an index of all samples, but 0.tar.gz cannot"):
        streamed(urls, **options).open()


def test_a_data_set_of_streams_shows_and_trains(urls: list[str]) -> None:
    data = open_data_set(streamed(urls, streams=6), share=None, held_out=None)
    assert len(data.shown_batch(8, seed=3)) == 8
    feed = data.training_feed(seed=3, global_batch_size=6, micro_batch_size=6, rank=0, ranks=1)
    try:
        assert len(next(feed)[0]) == 6
    finally:
        data.close()
    held = open_data_set(streamed(urls, streams=1), share=0.5, held_out=None)
    with pytest.raises(ConfigError, match="hold out by validate.urls of tars that can be indexed"):
        held.held_out_feed(seed=3, samples=4, micro_batch_size=2, rank=0, ranks=1)


def test_every_slot_belongs_to_one_rank_and_one_stream() -> None:
    for batch in range(1, 25):
        for ranks in (n for n in range(1, batch + 1) if batch % n == 0):
            for micro in (n for n in range(1, batch // ranks + 1) if batch // ranks % n == 0):
                for count in (n for n in range(1, batch + 1) if batch % n == 0):
                    slots = []
                    for rank in range(ranks):
                        sizes = {"global_batch_size": batch, "micro_batch_size": micro, "rank": rank, "ranks": ranks}
                        request = FeedRequest(index=None, rows=np.arange(1), seed=0, **sizes)
                        pieces = [
                            (part.stream * batch // count + begin, part.stream * batch // count + end)
                            for part in parts_of_rank(request, count)
                            for begin, end in zip(part.cuts, part.cuts[1:], strict=False)
                        ]
                        assert all(begin // micro == (end - 1) // micro for begin, end in pieces)
                        slots += [slot for begin, end in pieces for slot in range(begin, end)]
                    assert slots == list(range(batch))


def test_numbers_that_fit_are_chosen() -> None:
    given = ((768, 64), (768, 5), (7, 3), (1, 9), (16, 4), (6, 4), (1, 4), (5, 0), (5, 8))
    assert [largest_divisor(*each) for each in given] == [64, 4, 1, 1, 4, 3, 1, 0, 5]


def test_few_streams_use_few_workers(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with feeding(streamed(urls, streams=1, num_workers=2)) as feed:
        next(feed)
    assert "Of 2 workers 1 are used: this rank reads 1 streams" in caplog.text
