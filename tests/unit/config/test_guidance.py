"""Classifier-free guidance of samples comes from the stage where nobody gives a scale."""

from __future__ import annotations

import pytest

from cascade_train.commands.generate import GenerateArgs
from cascade_train.commands.parts.models import set_decoding
from cascade_train.config.saved import published_config
from tests.unit.config.composing import checked

SCALES = {
    "model=b_3b task=reconstruction": 1.1,
    "model=b_700m task=reconstruction": 1.1,
    "model=b_tiny task=lora": 1.1,
    "model=c_3b task=finetune": 4.0,
    "model=c_1b task=lora": 4.0,
    "model=c_tiny task=controlnet": 4.0,
    "model=c_tiny task=reconstruction objective=preview": None,
    "model=a task=reconstruction": None,
}
"""The scale of a composition that names none; null where nothing is sampled."""


@pytest.mark.parametrize("chosen", SCALES)
def test_samples_are_guided_as_their_stage_is(chosen: str) -> None:
    assert checked(*chosen.split()).sample.guidance_scale == SCALES[chosen]
    assert checked(*chosen.split(), "sample.guidance_scale=2.5").sample.guidance_scale == 2.5


@pytest.mark.parametrize(("model", "scale"), [("b_700m", 1.1), ("b_3b", 1.1), ("c_1b", 4.0)])
def test_published_weights_alone_are_guided_as_their_stage_is(model: str, scale: float) -> None:
    assert published_config(model, "weights").sample.guidance_scale == scale


@pytest.mark.parametrize("chosen", ["model=b_700m task=reconstruction", "experiment=tiny_b"])
def test_a_decoder_after_stage_c_samples_as_the_original_does_whatever_its_run_did(chosen: str) -> None:
    cfg = checked(*chosen.split(), "sample.steps=30")
    set_decoding(cfg, GenerateArgs(source="c", prompts=["a"]))
    assert (cfg.sample.guidance_scale, cfg.sample.steps) == (1.1, 10)
    set_decoding(cfg, GenerateArgs(source="c", prompts=["a"], decoder="b", decoder_guidance_scale=0.0))
    assert cfg.sample.guidance_scale == 0.0
