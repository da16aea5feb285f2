"""Outcomes shared between ranks, on one rank (two ranks: tests/distributed)."""

import pytest

from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.errors import ConfigError, RunError


def failing(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize("share", [from_rank_zero, from_every_rank])
@pytest.mark.parametrize(
    ("raised", "seen", "text"),
    [
        (ConfigError("bad key"), ConfigError, "^bad key$"),
        (RunError("bad sample"), RunError, "^bad sample$"),
        (OSError(28, "No space left"), RunError, "rank 0: OSError: .*No space left"),
        (KeyError("defect"), KeyError, "defect"),
    ],
)
def test_an_error_keeps_its_kind(world, share, raised, seen, text):
    with pytest.raises(seen, match=text):
        share(failing(raised))


def test_values_come_back(world):
    assert from_rank_zero(lambda: {"a": 1}) == {"a": 1}
    assert from_rank_zero(lambda: None) is None
    assert from_every_rank(lambda: 3) == [3]
