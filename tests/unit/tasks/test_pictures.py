"""What tasks and objectives share that score pictures."""

import pytest
import torch

from cascade_train.tasks.pictures import RoundTrip
from tests.unit.tasks.task_contract import CPU, component, make_batch


def test_a_distance_is_a_number_for_each_picture() -> None:
    image, original = torch.zeros(2, 3, 4, 6), torch.stack([torch.full((3, 4, 6), value) for value in (0.5, -2.0)])
    absolute, squared = (component("objective", "preview", pixel=pixel).pixels for pixel in ("l1", "l2"))
    assert absolute(image, original).tolist() == [0.5, 2.0]
    assert squared(image, original).tolist() == [0.25, 4.0]
    mask = torch.ones(2, 1, 4, 6)
    mask[1] = 0.0
    assert squared(image, original, mask).tolist() == [0.25, 0.0]


def test_pictures_become_fractions_and_must_be_there() -> None:
    task = component("task", "reconstruction").for_objective(component("objective", "preview"))
    task.device, batch = CPU, make_batch(0)
    picture = task.prepare_batch(batch).image_BCHW
    assert picture.dtype == torch.float32
    assert torch.equal((picture * 255).round().to(torch.uint8), batch.image_BCHW)
    object.__setattr__(batch, "image_BCHW", None)
    with pytest.raises(AssertionError, match="a cache is no data for a task"):
        task.prepare_batch(batch)
    with pytest.raises(AssertionError, match="pictures of prompts alone are refused before"):
        RoundTrip(None, "reconstruction").paint(["a circle"], None, lambda _: [])
