import pytest

from tests.unit.models.stages import tiny_network

RES_TIME = ["SDCascadeResBlock", "SDCascadeTimestepBlock"]


def test_network_is_made_on_the_meta_device() -> None:
    config = tiny_network()
    assert {p.device.type for p in config.build().parameters()} == {"meta"}
    assert config.residual_blocks == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": [0.1]}, r"network\.dropout=\[0\.1\]: needs one entry for each of the 2 levels"),
        ({"up_num_layers_per_block": [1, 2, 3]}, r"up_num_layers_per_block=.*needs one entry for each"),
        ({"switch_level": [False, False]}, r"network\.switch_level=\[False, False\]: needs 1 entries"),
        ({"num_attention_heads": [2, 5]}, r"network\.num_attention_heads\[1\]=5: must divide the level's width 32"),
        ({"num_attention_heads": [0, 2]}, r"num_attention_heads\[0\]=0: must divide the level's width"),
        ({"block_types_per_layer": [RES_TIME[::-1], RES_TIME]}, r"block_types_per_layer\[0\]=.*or the first two"),
        ({"kernel_size": 4}, r"network\.kernel_size=4: must be odd"),
        ({"attention_dropout": "both"}, r"network\.attention_dropout=both is unknown; choose one of probabilities"),
        ({"dropout": [0.0, 1.0]}, r"network\.dropout=\[0\.0, 1\.0\]: must lie in \[0, 1\)"),
    ],
)
def test_numbers_that_make_no_network_are_refused(change: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        tiny_network(**change)


def test_levels_without_attention_need_no_heads() -> None:
    network = tiny_network(block_types_per_layer=[RES_TIME, RES_TIME], num_attention_heads=[0, -1])
    assert not any("attention" in name for name, _ in network.build().named_parameters())
