"""The recipes of other trainers, and the flags of their guides, as the importer reads them."""

from __future__ import annotations

import pytest

from cascade_train.config.recipes.reading import read_flags
from tests.unit.config.composing import checked
from tests.unit.config.defaults import shipped, shipped_files
from tests.unit.config.seeds import RECIPES_OF_SEEDS, SEEDS, imported, seed_values

FLAGS = SEEDS["mindone/flags"]


def test_every_recipe_has_a_file_and_every_file_a_recipe() -> None:
    names = {name for name, entry in SEEDS.items() if "file" in entry} - {"open_diffusion/speed"}
    assert set(RECIPES_OF_SEEDS.values()) == names
    assert {f"experiment/{name}" for name in RECIPES_OF_SEEDS} <= set(shipped_files())
    assert sum(len(seed_values(name)) for name in RECIPES_OF_SEEDS) > 200


@pytest.mark.parametrize("name", [name for name in RECIPES_OF_SEEDS if name.startswith("sd_")])
def test_a_recipe_names_what_its_file_sets_otherwise_than_the_defaults(name: str) -> None:
    numbers = {key: value for key, value in seed_values(name).items() if key.startswith(("train.", "optimizer.lr"))}
    assert numbers.keys() - {"train.max_steps"} <= shipped(f"experiment/{name}").keys()


def test_the_network_of_the_benchmark_is_that_of_the_template() -> None:
    template, speed = (SEEDS[f"open_diffusion/{name}"]["file"] for name in ("template", "speed"))
    assert speed["unet"]["params"] == template["model"]["unet"]["params"]
    cfg = checked("experiment=sd_from_scratch", "data.urls=[a.tar]", "data.num_examples_to_see=9")
    given = template["model"]["unet"]["params"]
    same = [key for key in given if cfg.model.network[key] == given[key]]
    assert set(given) - set(same) == {"attention_head_dim"}
    assert set(cfg.model.network.attention_head_dim) == {given["attention_head_dim"]}


def test_mindones_flags_are_taken_over() -> None:
    bias, given = imported("mindone/guide", FLAGS["timestep_bias"]).values, read_flags(FLAGS["timestep_bias"])
    for key in ("strategy", "multiplier", "portion"):
        assert bias[f"objective.timestep_bias.{key}"] == given[f"timestep_bias_{key}"]
    for key in ("begin", "end"):
        assert bias[f"objective.timestep_bias.{key}"] == pytest.approx(given[f"timestep_bias_{key}"] / 1000)
    snr = imported("mindone/guide", FLAGS["min_snr"])
    assert snr.groups["objective"] == "ddpm_min_snr"
    assert snr.values["objective.loss_weight.gamma"] == read_flags(FLAGS["min_snr"])["snr_gamma"]
    long = imported("mindone/guide", FLAGS["long_prompts"]).values
    assert long["model.text_encoder.long_captions"] is long["model.text_encoder_2.long_captions"] is True
    assert "cascade-train cache" in imported("mindone/guide", FLAGS["cache"]).fates["cache_latent"][1]
