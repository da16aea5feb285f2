import pytest

from cascade_train.config.preflight import divisors, nearest_multiples, split_batch
from cascade_train.errors import ConfigError


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [None, 1])
def test_global_batch_is_micro_times_ranks_times_accumulation(ranks: int, micro: int | None):
    assert 8 % (split_batch(8, micro, ranks) * ranks) == 0


def test_no_micro_batch_size_means_no_accumulation():
    assert split_batch(32, None, 4) == 8


def test_three_ranks_refuse_eight_and_name_what_fits():
    with pytest.raises(ConfigError, match=r"=8 cannot.*3 ranks: 6 or 9;.*fit 8: 1, 2, 4, 8\."):
        split_batch(8, None, 3)


def test_micro_batch_that_leaves_a_rest_is_refused_with_sizes_that_fit():
    with pytest.raises(ConfigError, match=r"micro_batch_size=3 and 2 ranks.*fit: 1, 2, 4; global.*fit: 6 or 12\."):
        split_batch(8, 3, 2)


def test_micro_batch_larger_than_a_ranks_share_is_refused():
    with pytest.raises(ConfigError, match=r"micro_batch_size=16 and 1 rank\. .*fit: 1, 2, 4, 8; global.*fit: 16\."):
        split_batch(8, 16, 1)


def test_nearest_multiples_leave_zero_out():
    assert nearest_multiples(2, 3) == "3"
    assert nearest_multiples(8, 3) == "6 or 9"


def test_divisors_are_listed():
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
