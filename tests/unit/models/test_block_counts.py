"""Numbers of blocks of a stranger's run: those that take minutes are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from cascade_train.errors import ConfigError
from tests.unit.tasks.task_contract import component

MANY = 10**6


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("option", "changes", "key"),
    [
        *(
            ("c_tiny", {"network": {key: [1, MANY]}}, f"network.{key}")
            for key in (
                "down_num_layers_per_block",
                "up_num_layers_per_block",
                "down_blocks_repeat_mappers",
                "up_blocks_repeat_mappers",
            )
        ),
        ("sd_tiny", {"network": {"layers_per_block": MANY}}, "network.layers_per_block"),
        ("sd_tiny", {"network": {"transformer_layers_per_block": [1, MANY]}}, "network.transformer_layers_per_block"),
        ("sd_tiny", {"vae": {"layers_per_block": MANY}}, "layers_per_block"),
        ("c_tiny", {"text_encoder": {"num_hidden_layers": MANY}}, "text_encoder.num_hidden_layers"),
        ("vae_tiny", {"layers_per_block": MANY}, "model.layers_per_block"),
        ("a_tiny", {"bottleneck_blocks": MANY}, "model.bottleneck_blocks"),
        ("a_tiny", {"levels": MANY}, "model.levels"),
    ],
)
def test_blocks_that_take_minutes_are_refused(option: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=rf"{key}={MANY} must lie in \[0, 1000\]"):
        component("model", option, **changes)
