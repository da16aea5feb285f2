"""What the tasks share that are scored by pictures."""

import pytest
import torch

from cascade_train.tasks.pictures import RoundTrip, pictures_of, pixel_distance
from tests.unit.tasks.task_contract import CPU, make_batch


def test_a_distance_is_a_number_for_each_picture() -> None:
    image, original = torch.zeros(2, 3, 4, 6), torch.stack([torch.full((3, 4, 6), value) for value in (0.5, -2.0)])
    assert pixel_distance(image, original, "l1").tolist() == [0.5, 2.0]
    assert pixel_distance(image, original, "l2").tolist() == [0.25, 4.0]
    mask = torch.ones(2, 1, 4, 6)
    mask[1] = 0.0
    assert pixel_distance(image, original, "l2", mask).tolist() == [0.25, 0.0]


def test_pictures_become_fractions_and_must_be_there() -> None:
    batch = make_batch(0)
    picture = pictures_of(batch, CPU)
    assert picture.dtype == torch.float32
    assert torch.equal((picture * 255).round().to(torch.uint8), batch.image_BCHW)
    object.__setattr__(batch, "image_BCHW", None)
    with pytest.raises(AssertionError, match="a cache is no data for a task"):
        pictures_of(batch, CPU)
    with pytest.raises(AssertionError, match="nobody asks for pictures of prompts alone"):
        RoundTrip(None).paint(["a circle"], None, lambda _: [])
