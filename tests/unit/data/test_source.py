from __future__ import annotations

from typing import Any

import pytest

from tests.unit.data.test_shapes import shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip_prob": 1.5}, "data.flip_prob=1.5 must lie between 0 and 1"),
        ({"max_file_mib": 0}, "data.max_file_mib=0 must be at least 1: null reads any file"),
        ({"max_pixels": 0}, "data.max_pixels=0 must be at least 1: null decodes any picture"),
        ({"max_unreadable_share": -0.1}, "data.max_unreadable_share=-0.1 must lie between 0 and 1"),
        ({"max_wait_seconds": 0.0}, "data.max_wait_seconds=0.0 must be above 0, or null"),
        ({"crop": "left"}, "data.crop=left is unknown; choose one of center, random, saliency"),
    ],
)
def test_limits_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(**options)
