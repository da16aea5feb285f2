"""Stages for tests, made from the shipped model files as a run makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from cascade_train.assembly.build import build_node
from cascade_train.config.groups import option_files
from cascade_train.distributed.parallelize import materialise
from cascade_train.engine.run.config_difference import flatten

CONF = Path(__file__).parents[3] / "conf"
LEVELLED = {
    "weights": None,
    "network": {
        "patch_size": 2,
        "block_out_channels": [32, 64, 64],
        "num_attention_heads": [0, 2, 2],
        "down_num_layers_per_block": [1, 1, 1],
        "up_num_layers_per_block": [1, 1, 1],
        "down_blocks_repeat_mappers": [1, 1, 1],
        "up_blocks_repeat_mappers": [2, 1, 1],
        "block_types_per_layer": [
            ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
            ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
            ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
        ],
        "dropout": [0.0, 0.0, 0.0],
    },
}
"""What makes of a tiny Stage B one of levels and small patches, as the published ones are."""

_TOWER = {"weights": None, "subfolder": None, "intermediate_size": 64, "num_hidden_layers": 2}
_VAE = {
    **{"weights": None, "scaling_factor": 1.0, "latent_channels": 4},
    **{"block_out_channels": [16, 16, 32], "norm_num_groups": 8},
}
_SMALL = {"image_size": 32, "random_encoders": True, "weights": None, "vae": _VAE}
_NETWORK = {"in_channels": 4, "out_channels": 4, "block_out_channels": [32, 64], "norm_num_groups": 8}
UNTRAINED: dict[str, dict[str, Any]] = {
    "sd_tiny": {
        **_SMALL,
        "network": {**_NETWORK, "cross_attention_dim": 32},
        "text_encoder": {**_TOWER, "hidden_size": 32, "num_attention_heads": 2},
    },
    "sdxl_tiny": {
        **_SMALL,
        "network": {
            **_NETWORK,
            "transformer_layers_per_block": [1, 2],
            "cross_attention_dim": 80,
            "projection_class_embeddings_input_dim": 88,
        },
        "text_encoder": {**_TOWER, "hidden_size": 32, "num_attention_heads": 2},
        "text_encoder_2": {**_TOWER, "hidden_size": 48, "num_attention_heads": 3, "projection_dim": 40},
    },
    "vae_tiny": {"image_size": 32, **_VAE},
}
"""What makes of the tiny models in the package untrained ones with seeded parts, as small as an architecture can be."""


def untrained(model: str) -> tuple[str, ...]:
    """Return the overrides of a command that choose a model and make it `UNTRAINED`."""
    values = flatten({"model": UNTRAINED[model]}).items()
    return f"model={model}", *(f"{key}={json.dumps(value)}" for key, value in values)


def model_config(model: str, *changes: dict[str, Any]) -> Any:
    """Return the resolved node of `conf/model/<model>.yaml`, `UNTRAINED` if tiny, with changes merged over it."""
    node = OmegaConf.create(option_files("model", CONF)[model])
    node.pop("defaults", None)
    nodes = [{"run": {"seed": 0}}, {"model": node}, {"model": UNTRAINED.get(model, {})}]
    config = OmegaConf.merge(*nodes, *({"model": change} for change in changes))
    OmegaConf.resolve(config)
    return config.model


def random_weights() -> Any:
    """Return what `debug=random_weights` changes in the model's node."""
    return OmegaConf.load(CONF / "debug" / "random_weights.yaml").model


def make_stage(model: str, *changes: Any) -> Any:
    """Construct a stage without building it."""
    return build_node(model_config(model, *changes))


def build_stage(model: str, *changes: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Construct a stage and build it whole on the CPU."""
    stage = make_stage(model, *changes)
    stage.build(device=torch.device("cpu"), network_dtype=dtype, frozen_dtype=dtype)
    stage.fill(materialise(stage.network, torch.device("cpu")))
    return stage


def tiny_network(**changes: Any) -> Any:
    """Return the architecture of c_tiny's network, narrower and shallower unless changed."""
    small = {
        "block_out_channels": [32, 32],
        "num_attention_heads": [2, 2],
        "conditioning_dim": 32,
        "down_num_layers_per_block": [1, 2],
        "up_num_layers_per_block": [2, 1],
        "clip_text_in_channels": 24,
        "clip_text_pooled_in_channels": 24,
        "clip_image_in_channels": 16,
    }
    return build_node(model_config("c_tiny", {"network": small | changes}).network)


def filled_network(**changes: Any) -> Any:
    """Build a small network whose every parameter is far from zero."""
    from cascade_train.models.initialize import Fill, initialise

    config = tiny_network(**changes)
    network = config.build()
    rule = lambda _name, _parameter: Fill(kind="normal", scale=0.15)  # noqa: E731
    initialise(network, rule, device=torch.device("cpu"), dtype=torch.float32, seed=3)
    return network


def network_inputs(batch: int = 2, side: int = 6) -> dict[str, torch.Tensor]:
    """Draw inputs of a `tiny_network`."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "sample": draw(batch, 16, side, side + 1),
        "timestep_ratio": torch.linspace(0.1, 0.9, batch),
        "clip_text_pooled": draw(batch, 1, 24),
        "clip_text": draw(batch, 5, 24),
        "clip_img": draw(batch, 1, 16),
    }
