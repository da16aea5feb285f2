"""Options of models that do not fit, and numbers of blocks that take minutes, are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from cascade_train.errors import ConfigError
from tests.unit.models.cascade.test_stage_c import TINY_VISION
from tests.unit.models.stages import make_stage

MANY = 10**6
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a_tiny", {"image_size": 98}, r"model.image_size=98: .* of 4 pixels, 2 to the power of model.levels"),
    ("a_tiny", {"scale_factor": 0.0}, r"model.scale_factor=0.0 must be greater than 0"),
    ("b_tiny", {"image_size": 100}, "model.image_size=100: must be a multiple of 32"),
    ("b_tiny", {"shrink_range": [0.0, 1.0]}, "give the smallest and the largest factor"),
    ("b_tiny", {"shrink_range": [0.8, 0.5]}, "give the smallest and the largest factor"),
    ("b_tiny", {"semantic_noise": -0.1}, r"semantic_noise=-0.1: is a standard deviation, give 0 or more"),
    ("b_tiny", {"network": {"in_channels": 8}}, "network.in_channels=8: must equal model.stage_a.latent_channels=4"),
    ("b_tiny", {"network": {"effnet_in_channels": 4}}, "must equal model.semantic_compressor.latent_channels=16"),
    ("b_tiny", {"network": {"clip_text_pooled_in_channels": 64}}, "must equal model.text_encoder.projection_dim=128"),
    ("c_tiny", {"image_size": 0}, r"model\.image_size=0: must be a multiple of 32 pixels"),
    ("c_tiny", {"network": {"in_channels": 4}}, r"network\.in_channels=4: must equal model\.semantic_compressor"),
    ("c_tiny", {"network": {"clip_text_in_channels": None}}, r"Stage C needs both"),
    ("c_tiny", {"text_encoder": {"hidden_size": 64}}, r"clip_text_in_channels=128: must equal model\.text_enc"),
    ("c_tiny", {"text_encoder": {"projection_dim": 64}}, r"clip_text_pooled_in_channels=128: must equal"),
    ("c_tiny", {"text_encoder": {"max_tokens": 2}}, r"text_encoder\.max_tokens=2 must be at least 3"),
    ("c_tiny", {"text_encoder": {"num_attention_heads": 3}}, r"text_encoder\.num_attention_heads=3: must divide"),
    ("c_tiny", {"image_encoder": TINY_VISION | {"projection_dim": 64}}, r"clip_image_in_channels=128: must equal"),
    ("c_tiny", {"image_encoder": TINY_VISION | {"num_attention_heads": 3}}, r"num_attention_heads=3: must div"),
    ("c_tiny", {"image_encoder": TINY_VISION | {"patch_size_px": 15}}, r"patch_size_px=15: must divide .*size_px=28"),
    ("sd15", {"weights": None}, r"model\.text_encoder\.weights=null: it follows model\.weights unless it is set"),
    ("sd_tiny", {"image_size": 30}, r"must be a multiple of 4 pixels, the stride of model\.vae"),
    ("sd_tiny", {"network": {"in_channels": 9}}, r"in_channels=9: must equal model\.vae\.latent_channels=4"),
    ("sd_tiny", {"network": {"cross_attention_dim": 9}}, r"cross_attention_dim=9: must equal model\.text_encoder"),
    ("sd_tiny", {"network": {"attention_head_dim": [2]}}, r"attention_head_dim=\[2\]: needs one entry for each of"),
    ("sd_tiny", {"network": {"attention_head_dim": [2, 3]}}, "64 must be a multiple of its 3 heads"),
    ("sd_tiny", {"network": {"up_block_types": ["A", "B"]}}, "may have UpBlock2D and CrossAttnUpBlock2D alone"),
    ("sd_tiny", {"network": {"dropout": 1.0}}, r"dropout=1\.0: is a probability, give one in"),
    ("sd_tiny", {"vae": {"scaling_factor": 0.0}}, r"scaling_factor=0\.0 must be greater than 0"),
    ("sd_tiny", {"vae": {"norm_num_groups": 5}}, r"norm_num_groups=5: must divide the widths \[16, 16, 32\]"),
    ("sd_tiny", {"text_encoder": {"hidden_layer": -3}}, "hidden_layer=-3: is counted from the end, give -1"),
    ("sd_tiny", {"text_encoder": {"hidden_layer": 0}}, "hidden_layer=0: is counted from the end, give -1"),
    ("sdxl_tiny", {"network": {"cross_attention_dim": 32}}, "must equal 80, the hidden sizes of both text towers"),
    ("sdxl_tiny", {"text_encoder": {"long_captions": True}}, r"_2\.long_captions=False: must be that of .*, True"),
    ("sdxl_tiny", {"text_encoder_2": {"projection_dim": None}}, "=None and six times model.network.addition_time"),
]
BLOCKS = [
    ("c_tiny", {"network": {"down_num_layers_per_block": [1, MANY]}}, "network.down_num_layers_per_block"),
    ("sd_tiny", {"vae": {"layers_per_block": MANY}}, "layers_per_block"),
]
REFUSED += [(model, changes, rf"{key}={MANY} must lie in \[0, 1000\]") for model, changes, key in BLOCKS]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("model", "changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make_stage(model, changes)
