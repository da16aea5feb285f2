"""What a saved position means: exact continuation, refusal, or another epoch by choice."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cascade_train.data.buckets import Buckets
from cascade_train.data.index.rows import Index
from cascade_train.data.order.position import FeedRequest, Order
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.order.test_plan import pairs

SHAPES = [(64, 64), (128, 64), (64, 128), (96, 64), (64, 64)]
RATIOS = ["1/1", "1/2", "2/3"]


class Sized(Source):
    """Samples of which only the size is known."""

    def open(self) -> Index:
        raise AssertionError("not opened here")

    def read(self, row: int) -> RawSample:
        raise AssertionError("not read here")


def source(**options: Any) -> Sized:
    buckets = {"aspect_ratios": RATIOS, "buckets": Buckets(multiple_px=8)}
    return Sized(**{**tars.ORDER, "image_size": 64, **buckets, **options})


def index(count: int = 97, shards: int = 6) -> Index:
    width, height = np.resize(SHAPES, (count, 2)).T
    names = tuple(f"{shard}.tar" for shard in range(shards))
    columns = {"shard": np.sort(np.arange(count) % shards), "width": width, "height": height}
    return tars.index(map(str, range(count)), names, **columns)


def order(*, of: Index | None = None, size: int = 8, **options: Any) -> Order:
    of = index() if of is None else of
    defaults = {"rows": np.arange(len(of)), "seed": 0, "whole_epochs": False}
    asked = {key: options.pop(key, value) for key, value in defaults.items()}
    sizes = {"global_batch_size": size, "micro_batch_size": size, "rank": 0, "ranks": 1}
    return Order(source(**options), FeedRequest(index=of, **sizes, **asked))


def drawn(of: Order, positions: range) -> list[tuple[int, int]]:
    """Return (epoch, row) of the samples that count."""
    return [pair for position in positions for pair in pairs(of.step(position))]


def saved(of: Order, position: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(of.state(position)))
    return state


@pytest.mark.parametrize("whole_epochs", [False, True])
@pytest.mark.parametrize("random_share", [0.0, 0.3])
def test_a_state_continues_exactly_and_its_states_are_the_same(whole_epochs: bool, random_share: float) -> None:
    options = {"whole_epochs": whole_epochs, "buckets": Buckets(multiple_px=8, random_share=random_share)}
    whole = order(**options)
    for position in (0, 1, 12, 13, 40, 123):
        again = order(**options)
        assert again.restore(saved(whole, position)) == position
        ahead = range(position, position + 30)
        assert drawn(again, ahead) == drawn(whole, ahead)
        assert [again.state(p) for p in ahead] == [whole.state(p) for p in ahead]


@pytest.mark.parametrize("whole_epochs", [False, True])
def test_another_batch_size_is_refused_or_continues_the_epoch(
    whole_epochs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = order(whole_epochs=whole_epochs)
    with pytest.raises(ConfigError, match="batches of 8 .* train.global_batch_size=6: .* data.on_change=restart"):
        order(size=6, whole_epochs=whole_epochs).restore(saved(first, 5))
    second = order(size=6, whole_epochs=whole_epochs, on_change="restart")
    assert second.restore(saved(first, 5)) == 5
    third = order(size=3, whole_epochs=whole_epochs, on_change="restart")
    third.restore(saved(second, 12))
    parts = [drawn(first, range(5)), drawn(second, range(5, 12)), drawn(third, range(12, 60))]
    together = [pair for part in parts for pair in part]
    assert len(set(together)) == len(together)
    first_epoch = {row for epoch, row in together if epoch == 0}
    assert len(first_epoch) == 97
    assert "Epoch 0 continues with global batches of 6." in caplog.text


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"aspect_ratios": ["1/1", "1/2"]}, "buckets was .* set data.aspect_ratios and data.buckets back"),
        ({"buckets": Buckets(multiple_px=8, random_share=0.05)}, "buckets was .*/0, is .*/0.05"),
        ({"of": index(99)}, r"index was .*: the files behind data changed \(97 samples then, 99 now, from "),
        ({"replacement": True}, "replacement was none, is true: set data.replacement back"),
        ({"shuffle_window_shards": 3}, "window was 2, is 3: set data.shuffle_window_shards back"),
        ({"seed": 4}, "seed was 0, is 4: set run.seed back"),
        ({"rows": np.arange(90)}, "rows was .* other samples take part: set validate.share, "),
    ],
)
def test_changed_data_is_refused_or_followed_by_another_epoch(
    changed: dict[str, Any], remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved(order(), 20)
    order(**changed).steps_of_epochs(3, state)  # is asked before the state is restored
    with pytest.raises(ConfigError, match=f"{remedy}.*, or end the epoch here by data.on_change=restart"):
        order(**changed).restore(state)
    other = order(**changed, on_change="restart")
    assert other.restore(state) == 20
    epoch = state["start"]["epoch"] + 1
    assert min(e for e, _ in drawn(other, range(20, 60))) >= epoch
    assert f"epoch {epoch} begins." in caplog.text
    again = order(**changed)
    assert again.restore(saved(other, 33)) == 33, "what was restarted continues as usual"
    assert drawn(again, range(33, 60)) == drawn(other, range(33, 60))


def test_epochs_count_steps() -> None:
    assert order().steps_of_epochs(2) == 25
    counts = [39, 20, 19, 19]  # of 64x64, 128x64, 64x128 and 96x64
    assert sum(counts) == 97
    assert order(whole_epochs=True).steps_of_epochs(2) == 2 * sum(-(-n // 8) for n in counts)
    resumed = order()
    resumed.restore(saved(resumed, 30))
    assert resumed.steps_of_epochs(2) == 25


@pytest.mark.parametrize("whole_epochs", [False, True])
def test_epochs_that_are_left_are_counted_in_the_data_that_a_run_goes_on_with(whole_epochs: bool) -> None:
    state = saved(order(whole_epochs=whole_epochs), 30)
    epoch = state["start"]["epoch"]
    assert order(whole_epochs=whole_epochs).steps_of_epochs(5, state) == order(
        whole_epochs=whole_epochs
    ).steps_of_epochs(5)
    fewer = order(of=index(48), whole_epochs=whole_epochs, on_change="restart")
    assert fewer.steps_of_epochs(epoch + 3, state) == 30 + fewer.steps_of_epochs(2)
    assert fewer.steps_of_epochs(epoch + 1, state) == 30, "the epoch that was cut short counts"
    fewer.restore(state)
    later = order(of=index(48), whole_epochs=whole_epochs)
    assert later.steps_of_epochs(epoch + 3, saved(fewer, 35)) == fewer.steps_of_epochs(epoch + 3, state)


def test_epochs_with_other_batches_count_the_samples_that_are_left() -> None:
    state = saved(order(), 6)
    larger = order(on_change="restart", size=16)
    assert larger.steps_of_epochs(2, state) == 6 + -(-(2 * 97 - 6 * 8) // 16)


@pytest.mark.parametrize(
    "options",
    [{"replacement": True}, {"buckets": Buckets(multiple_px=8, random_share=1.0)}],
)
def test_whole_epochs_hold_every_sample_once_whatever_training_does(options: dict[str, Any]) -> None:
    whole = order(whole_epochs=True, **options)
    assert sorted(drawn(whole, range(whole.steps_of_epochs(1)))) == [(0, row) for row in range(97)]
    assert drawn(whole, range(10)) == drawn(order(whole_epochs=True), range(10))
