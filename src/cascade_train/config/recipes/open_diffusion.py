"""What the keys of open-diffusion's file mean here, beyond open_diffusion.yaml: its network, and its frozen parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.config.arguments import parameters
from cascade_train.config.recipes.recipe import Recipe
from cascade_train.config.targets import import_target

UNET, WIDTH = "model.unet.params.", "model.unet.params.cross_attention_dim"
ARCHITECTURE = "cascade_train.models.stable_diffusion.unet_config.ConditionUNetConfig"
WIDTHS = {"sd15": 768, "sd21_base": 1024}
PARTS: dict[str, dict[str, str | None]] = {
    "vae": {"model.vae.weights": None},
    "text_encoder": {"model.text_encoder.weights": None, "model.text_encoder.subfolder": "text_encoder"},
    "tokenizer": {"model.text_encoder.tokenizer": None, "model.text_encoder.tokenizer_subfolder": "tokenizer"},
}
"""Frozen part -> our keys; None = where its pipeline lies."""


def finish_open_diffusion(recipe: Recipe, given: Mapping[str, Any], _: bool) -> None:
    """Take the network and its frozen parts, the files of the data, and the length in steps."""
    if given.get(WIDTH) is not None and given[WIDTH] == WIDTHS.get(recipe.groups["model"]):
        _network(recipe, given)
    kind = recipe.groups["data"]
    path = "data.urls" if kind in ("webdataset", "classification") else "data.path"
    if given.get("dataset.params.path") is not None:
        recipe.put("dataset.params.path", {path: given["dataset.params.path"]})
    if kind == "csv":
        recipe.note("dataset.params", "the columns of its table are data.image_column and data.caption_column here")
    filters = {key.removeprefix(FILTERS): value for key, value in given.items() if key.startswith(FILTERS)}
    if filters:
        recipe.put([f"{FILTERS}{key}" for key in filters], {"data.row_filters": filters})
    examples, batch = given.get("experiment.num_examples_to_see"), recipe.values["train.global_batch_size"]
    if examples is not None:
        recipe.put("experiment.num_examples_to_see", {"train.max_steps": -(-int(examples) // batch)})
    else:
        recipe.note("experiment.num_examples_to_see", "train.max_steps=")


def _network(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Take the architecture of the network, and the weights of the frozen parts beside one that begins from nothing."""
    levels = len(given.get(f"{UNET}block_out_channels") or ())
    known = parameters(import_target(ARCHITECTURE))[0]
    for key, value in given.items():
        name = key.removeprefix(UNET)
        if key.startswith(UNET) and name in known and value is not None:
            listed = name in ("attention_head_dim", "transformer_layers_per_block") and isinstance(value, int)
            recipe.put(key, {f"model.network.{name}": [value] * levels if listed else value})
    if given.get("model.pretrained") is not None:
        return
    parts = {f"model.{part}.pretrained": ours for part, ours in PARTS.items()}
    if any(given.get(key) is None for key in parts):
        why = "model.weights=null, with the weights of the frozen parts: docs/weights.md"
        recipe.note("a network from nothing", why)
        return
    recipe.values["model.weights"] = None
    for key, ours in parts.items():
        recipe.put(key, {name: given[key] if value is None else value for name, value in ours.items()})


FILTERS = "dataset.params.filters."
