from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cascade_train.data.index.rows import ROW_FIELDS, Index, split
from cascade_train.errors import ConfigError


def index_of(keys: list[str], shards: tuple[str, ...] = ("a.tar",), **columns: Any) -> Index:
    table = np.zeros(len(keys), dtype=ROW_FIELDS)
    for name, values in columns.items():
        table[name] = values
    return Index(shards=shards, table=table, keys=np.array([key.encode() for key in keys]))


KEYS = [f"{i:05d}" for i in range(2000)]


def test_a_row_is_named_by_shard_and_key() -> None:
    assert index_of(["x", "größe"], ("a.tar", "b.tar"), shard=[0, 1]).name(1) == "b.tar:größe"


def test_the_digest_follows_the_content() -> None:
    digests = [
        index_of(["x", "y"]).digest,
        index_of(["x", "z"]).digest,
        index_of(["x"]).digest,
        index_of(["x", "y"], ("b.tar",)).digest,
        index_of(["x", "y"], width=[0, 1]).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert index_of(["x", "y"]).digest == digests[0]


def test_every_row_is_on_one_side() -> None:
    train, held_out = split(index_of(KEYS), 0.1)
    assert sorted([*train, *held_out]) == list(range(2000))
    assert 150 < len(held_out) < 250
    assert train.dtype == np.int64


def test_added_data_moves_no_key() -> None:
    few, many = index_of(KEYS[500:700]), index_of(KEYS)
    held_few = {few.name(row) for row in split(few, 0.2)[1]}
    held_many = {many.name(row) for row in split(many, 0.2)[1]}
    assert held_few == {name for name in held_many if name in {few.name(row) for row in range(200)}}


def test_a_larger_share_holds_out_what_a_smaller_one_did() -> None:
    index = index_of(KEYS)
    assert set(split(index, 0.1)[1]) < set(split(index, 0.3)[1])


def test_no_share_holds_out_nothing() -> None:
    train, held_out = split(index_of(KEYS), 0.0)
    assert (len(train), len(held_out)) == (2000, 0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="must be at least 0 and below 1"):
        split(index_of(KEYS), share)


def test_an_empty_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="validate.share=0.001 of 3 samples leaves 3 to train on and 0 held out"):
        split(index_of(KEYS[:3]), 0.001)
