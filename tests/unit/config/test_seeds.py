"""Each value of the files of open-diffusion, EveryDream and MindONE is in a key of the recipe that ships."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from cascade_train.config.groups import group_options
from cascade_train.engine.run.config_difference import flatten
from tests.unit.config.composing import composed
from tests.unit.config.defaults import differences, leaves_and_nodes
from tests.unit.config.seeds import HELD, SEEDS
from tests.unit.config.test_every_option import NEEDED

FLAGS = SEEDS["mindone/flags"]
HELD_FLAGS: dict[str, dict[str, Any]] = {
    "timestep_bias": {
        "timestep_bias_strategy": {"objective.timestep_bias.strategy": "range"},
        "timestep_bias_multiplier": {"objective.timestep_bias.multiplier": 2.0},
        "timestep_bias_portion": {"objective.timestep_bias.portion": 0.25},
        "timestep_bias_begin": {"objective.timestep_bias.begin": 0.2},  # of 1000 timesteps
        "timestep_bias_end": {"objective.timestep_bias.end": 0.5},
    },
    "min_snr": {"snr_gamma": {"objective": "ddpm_min_snr", "objective.loss_weight.gamma": 5.0}},
    "long_prompts": {
        "lpw": {"model.text_encoder.long_captions": True, "model.text_encoder_2.long_captions": True},
    },
    "cache": {"task": {"data": "cached"}, "cache_latent": {}, "cache_text_embedding": {}, "cache_path": {}},
    "edm": {"config": {"objective": "edm_sdxl"}},
}
"""MindONE's flags and the keys of ours that do the same; what is cached: cascade-train cache, then data=cached."""


@pytest.mark.parametrize("recipe", HELD)
def test_a_recipe_holds_every_value_of_its_file(recipe: str) -> None:
    held = HELD[recipe]
    without = [key for keys in held["without"].values() for key in keys]
    file = flatten(SEEDS[held["of"]]["file"])
    assert sorted(file) == sorted([*held["keys"], *held["places"], *without])
    cfg = composed(f"experiment={recipe}", *NEEDED[f"experiment={recipe}"])
    chosen = dict(HydraConfig.get().runtime.choices)
    wanted = {ours: value for assigned in held["keys"].values() for ours, value in assigned.items()} | held["silent"]
    assert len(wanted) > 15
    assert not differences(cfg, {key: value for key, value in wanted.items() if key not in chosen})
    assert {key: value for key, value in wanted.items() if chosen.get(key, value) != value} == {}
    there = {key for key, _ in leaves_and_nodes(cfg)}
    assert set(held["places"].values()) - there <= {"sample.prompts"}


def test_every_file_of_the_seeds_has_a_recipe() -> None:
    files = {name for name, entry in SEEDS.items() if "file" in entry} - {"open_diffusion/speed"}
    assert {held["of"] for held in HELD.values()} == files


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "source"])
def test_every_flag_of_mindones_guide_has_a_key(name: str) -> None:
    flags = [word.removeprefix("--") for word in shlex.split(FLAGS[name]) if word.startswith("--")]
    assert sorted(flags) == sorted(HELD_FLAGS[name])
    wanted = {key: value for assigned in HELD_FLAGS[name].values() for key, value in assigned.items()}
    choices = [f"{key}={value}" for key, value in wanted.items() if "." not in key]
    assert all(value in group_options(key) for key, value in wanted.items() if "." not in key)
    values = {key: value for key, value in wanted.items() if "." in key}
    typed = [f"{key}={str(value).lower()}" for key, value in values.items()]
    data = ["data.path=a", "data.crop=center"] if name == "cache" else ["data.path=a"]
    assert not differences(composed("experiment=sdxl_finetune", *data, *choices, *typed), values)


def test_the_network_of_the_benchmark_is_that_of_the_template() -> None:
    template, speed = (SEEDS[f"open_diffusion/{name}"]["file"] for name in ("template", "speed"))
    assert speed["unet"]["params"] == template["model"]["unet"]["params"]
