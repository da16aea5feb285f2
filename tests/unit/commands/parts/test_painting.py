"""Sampling settings that commands take."""

from __future__ import annotations

import pytest

from cascade_train.commands.parts.painting import PaintingArgs, override_sampling
from cascade_train.results.find import find_model


@pytest.mark.parametrize(("scale", "warns"), [(1.0, True), (3.0, False), (None, False)])
def test_a_negative_prompt_without_guidance_is_said_to_do_nothing(
    scale: float | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = find_model("package:tiny/sd", key="from", part=None).cfg
    override_sampling(cfg, PaintingArgs(source="package:tiny/sd", guidance_scale=scale, negative_prompt="dull"))
    assert cfg.sample.negative_prompt == "dull"
    assert ("negative_prompt= has no effect" in caplog.text) is warns
