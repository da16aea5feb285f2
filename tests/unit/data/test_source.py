from __future__ import annotations

from typing import Any

import pytest

from tests.unit.data.test_shapes import shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip_prob": 1.5}, "data.flip_prob=1.5 must lie between 0 and 1"),
        ({"max_file_mib": 0}, "data.max_file_mib=0 must be at least 1: null = no limit"),
        ({"max_pixels": 0}, "data.max_pixels=0 must be at least 1: null = no limit"),
        ({"max_unreadable_share": -0.1}, "data.max_unreadable_share=-0.1 must lie between 0 and 1"),
        ({"max_wait_seconds": 0.0}, "data.max_wait_seconds=0.0 must be above 0, or null"),
        ({"crop": "left"}, "data.crop=left is unknown; choose one of center, random, saliency"),
        ({"image_size": 0}, "data.image_size=0 must be at least 1: it is the side of a picture"),
        ({"shuffle_window_shards": 0}, "data.shuffle_window_shards=0 must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
        ({"worker_start": "thread"}, "data.worker_start=thread is unknown"),
        ({"leftover": "keep"}, "data.leftover=keep is unknown; choose one of carry, drop, flush"),
        ({"on_change": "ignore"}, "data.on_change=ignore is unknown; choose one of refuse, restart"),
        ({"num_examples_to_see": 0}, "data.num_examples_to_see=0 must be at least 1: null"),
        ({"max_text_kib": 0}, "data.max_text_kib=0 must be at least 1"),
        ({"aspect_ratios": "square"}, "data.aspect_ratios=square is no preset"),
    ],
)
def test_limits_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(**options)
