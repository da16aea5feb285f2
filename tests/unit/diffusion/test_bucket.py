from __future__ import annotations

import pytest
import torch

from cascade_train.diffusion.bucket import BucketAverage
from cascade_train.errors import ConfigError

BUCKET = torch.tensor([2, 0, 2, 2])
LOSS = torch.tensor([1.0, 5.0, 3.0, 8.0])


def updated(duplicates: str) -> torch.Tensor:
    average = BucketAverage(buckets=4, beta=0.75, duplicates=duplicates)
    average.update(BUCKET, LOSS)
    return average.state_dict()["bucket_loss"]


def test_samples_of_one_bucket_count_with_their_mean() -> None:
    torch.testing.assert_close(updated("mean"), torch.tensor([0.75 + 1.25, 1.0, 0.75 + 1.0, 1.0]))


def test_the_last_sample_of_a_bucket_wins_where_asked_for() -> None:
    torch.testing.assert_close(updated("last"), torch.tensor([0.75 + 1.25, 1.0, 0.75 + 2.0, 1.0]))


def test_the_mean_does_not_depend_on_the_order_of_samples() -> None:
    one, other = (BucketAverage(buckets=4, beta=0.5, duplicates="mean") for _ in range(2))
    one.update(BUCKET, LOSS)
    other.update(BUCKET.flip(0), LOSS.flip(0))
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_state_is_restored_to_the_bit_and_is_a_copy() -> None:
    average, fresh = (BucketAverage(buckets=4, beta=0.9, duplicates="mean") for _ in range(2))
    average.update(BUCKET, LOSS)
    saved = average.state_dict()
    fresh.load_state_dict(saved)
    average.update(BUCKET, LOSS)
    assert torch.equal(fresh.state_dict()["bucket_loss"], saved["bucket_loss"])
    assert not torch.equal(average.state_dict()["bucket_loss"], saved["bucket_loss"])


def test_state_of_another_number_of_buckets_is_refused() -> None:
    average = BucketAverage(buckets=4, beta=0.9, duplicates="mean")
    with pytest.raises(ConfigError, match="buckets=4, but the saved state has 7"):
        average.load_state_dict({"bucket_loss": torch.ones(7)})
