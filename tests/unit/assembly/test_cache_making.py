"""What a cache is made of, and what it refuses before anything is made."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cascade_train.assembly.cache_making import (
    Encoder,
    refuse_drawn_captions,
    refuse_random,
    refuse_unreadable,
    rows_by_size,
)
from cascade_train.data.captions import Captions
from cascade_train.errors import ConfigError, RunError
from tests.unit.models.stages import make_stage
from tests.unit.tasks.task_contract import make_batch


def test_a_stage_of_which_nothing_can_be_held_says_why():
    with pytest.raises(ConfigError, match=r"nothing of stage_b can be cached: .*model.shrink_range"):
        refuse_random(make_stage("b_tiny", {"shrink_range": [0.5, 1.0]}), None, None, captions=True)


def test_a_mask_is_held_at_the_latents_size_where_not_everything_counts():
    nothing = {name: lambda _: {} for name in ("make_image_products", "picture_facts")}
    stage = SimpleNamespace(latent_shape=lambda height, width: (16, 3, 3), **nothing)
    mask = torch.full((2, 1, 96, 96), 255, dtype=torch.uint8)
    mask[1, :, :16] = 0
    form = {"has_captions": False, "dtype": "bf16", "batch_size": 1}
    encoder = Encoder(stage=stage, maker=None, device=torch.device("cpu"), **form)
    whole, half = encoder.images(replace(make_batch(0, 1), tensors={"mask": mask}))
    assert whole == {}
    assert half["mask"].tolist() == [[[0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]


def test_joined_sources_with_captions_of_their_own_are_refused_without_captions():
    own = Captions(template="a {}")
    source = SimpleNamespace(captions=Captions(), captions_of=lambda row: own if row == 2 else source.captions)
    refuse_drawn_captions(source, np.arange(3), captions=True)
    refuse_drawn_captions(source, np.arange(2), captions=False)
    with pytest.raises(ConfigError, match="captions=false keeps captions as they are read"):
        refuse_drawn_captions(source, np.arange(3), captions=False)


def test_more_unreadable_pictures_than_the_run_allows_end_the_work():
    refuse_unreadable(["a", "b", "c"], 10, 0.0)
    refuse_unreadable(["x"] * 13, 1000, 0.01)
    with pytest.raises(RunError, match="14 of 1000 .* data.max_unreadable_share=0.01 allows: x; x.*_share=0.02"):
        refuse_unreadable(["x"] * 14, 1000, 0.01)


def test_rows_are_read_together_with_those_of_their_size():
    table = np.array([(64, 96), (96, 64), (64, 96), (0, 0)], dtype=[("height", "<i4"), ("width", "<i4")])
    found = rows_by_size(table, np.array([0, 1, 2]))
    assert {size: rows.tolist() for size, rows in found.items()} == {(64, 96): [0, 2], (96, 64): [1]}
