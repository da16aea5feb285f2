"""Sampling settings that commands take."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascade_train.commands.parts.models import SamplingArgs, override_sampling, own_keys
from cascade_train.errors import ConfigError
from cascade_train.results.find import find_model


def test_a_negative_prompt_is_read_from_a_file_of_one(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("dull\n")
    assert SamplingArgs(source="x", negative_prompt=f"@{tmp_path}/one.txt").negative_prompt == "dull"
    (tmp_path / "two.txt").write_text("dull\ngrey\n")
    with pytest.raises(ConfigError, match="negative_prompt=@.*two.txt: must be one text, and holds 2"):
        SamplingArgs(source="x", negative_prompt=f"@{tmp_path}/two.txt")


@pytest.mark.parametrize("key", ["steps", "sampler"])
def test_a_wrong_setting_is_refused_by_the_key_that_was_typed(key: str) -> None:
    cfg = find_model("package:tiny/sd", key="from", part=None).cfg
    given = {"steps": 0, "sampler": "euler"}[key]
    with pytest.raises(ConfigError, match=f"^{key}={given} must be "):
        override_sampling(cfg, SamplingArgs(source="package:tiny/sd", **{key: given}))


@pytest.mark.parametrize(
    ("given", "text"), [([], "sample.steps=1 and sample.shift=2"), (["shift"], "sample.steps=1 and shift=2")]
)
def test_keys_that_were_not_given_keep_their_names(given: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}$"), own_keys("sample", given):
        raise ConfigError("sample.steps=1 and sample.shift=2")


@pytest.mark.parametrize(("scale", "warns"), [(1.0, True), (3.0, False), (None, False)])
def test_a_negative_prompt_without_guidance_is_said_to_do_nothing(
    scale: float | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = find_model("package:tiny/sd", key="from", part=None).cfg
    override_sampling(cfg, SamplingArgs(source="package:tiny/sd", guidance_scale=scale, negative_prompt="dull"))
    assert cfg.sample.negative_prompt == "dull"
    assert ("negative_prompt= has no effect" in caplog.text) is warns
