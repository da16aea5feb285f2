"""What the keys of open-diffusion's file mean here, by open_diffusion.yaml.

The family of its network is recognised by the width of its text embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.config.arguments import parameters
from cascade_train.config.recipes.reading import flat as flatten
from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.config.recipes.table import load_table, take
from cascade_train.config.targets import import_target

TABLE = load_table("open_diffusion")
FALLBACK = "sd21_base"
"""The model that trains where the network is not said, or is none of this library's."""
EMA_DECAY = 0.9999
UNET = "model.unet.params."
ARCHITECTURE = "cascade_train.models.stable_diffusion.unet_config.ConditionUNetConfig"
PARTS: dict[str, dict[str, str | None]] = {
    "vae": {"model.vae.weights": None},
    "text_encoder": {"model.text_encoder.weights": None, "model.text_encoder.subfolder": "text_encoder"},
    "tokenizer": {"model.text_encoder.tokenizer": None, "model.text_encoder.tokenizer_subfolder": "tokenizer"},
}
"""Frozen part -> our keys; None = where its pipeline lies."""


def is_open_diffusion(source: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of open-diffusion's."""
    return {"system", "experiment", "dataset"} <= source.keys()


def from_open_diffusion(source: Mapping[str, Any], *, ranks: int, model: str | None) -> Recipe:
    """Translate one configuration, full training of its network, by the width of its captions, or of `model`.

    In `source` interpolations are resolved, and what is left to the user is `???`; its batch size is that of one of the
    `ranks`. `model` is an option of that group, to train in the place of its network.
    """
    flat = {key: value for key, value in flatten(source) if ".filters." not in key}
    given = {key: value for key, value in flat.items() if value is not None and value != "???"}
    own = TABLE["widths"].get(given.get("model.unet.params.cross_attention_dim"))
    recipe = Recipe(groups={"task": "finetune", "model": model or own or FALLBACK, "data": "webdataset"})
    take(recipe, given, TABLE)
    if recipe.groups["model"] == own:
        _network(given, recipe)
    filters = (source["dataset"].get("params") or {}).get("filters")
    if filters:
        recipe.values["data.row_filters"] = dict(filters)
    _data(flat, recipe)
    _train(given, recipe, ranks)
    _rest(given, recipe)
    if flat.get("experiment.project") == "???":
        recipe.note("experiment.project", "tracker.project=")
    return recipe


def _network(given: Mapping[str, Any], recipe: Recipe) -> None:
    """Take the architecture of the network, and the weights of the frozen parts beside one that begins from nothing."""
    levels = len(given.get(f"{UNET}block_out_channels", ()))
    for key, value in given.items():
        name = key.removeprefix(UNET)
        if key.startswith(UNET) and name in parameters(import_target(ARCHITECTURE))[0]:
            listed = name in ("attention_head_dim", "transformer_layers_per_block") and isinstance(value, int)
            recipe.put(key, {f"model.network.{name}": [value] * levels if listed else value})
    if "model.pretrained" in given:
        return
    parts = {f"model.{part}.pretrained": ours for part, ours in PARTS.items()}
    if not parts.keys() <= given.keys():
        recipe.note(
            "a network from nothing", "model.weights=null, with the weights of the frozen parts: docs/weights.md"
        )
        return
    recipe.values["model.weights"] = None
    for key, ours in parts.items():
        recipe.put(key, {name: given[key] if value is None else value for name, value in ours.items()})


def _data(flat: Mapping[str, Any], recipe: Recipe) -> None:
    kind, path = str(flat.get("dataset.type", "WebDataset")), flat.get("dataset.params.path")
    if kind not in TABLE["datasets"]:
        recipe.note("dataset.type", f"{kind} is none of open-diffusion's; data=webdataset in its place", Kind.MISSING)
    recipe.groups["data"], key = TABLE["datasets"].get(kind, TABLE["datasets"]["WebDataset"])
    if path == "???":
        recipe.note("dataset.params.path", f"{key}=")
    elif path is not None:
        recipe.values[key] = path
    classes = flat.get("dataset.params.class_mapping")
    if isinstance(classes, str) and classes != "???":
        recipe.values["data.idx_to_prompt"] = classes
    if recipe.groups["data"] == "csv":
        recipe.note("dataset.type", f"{kind}: its columns are data.image_column and data.caption_column here")


def _train(given: Mapping[str, Any], recipe: Recipe, ranks: int) -> None:
    micro, passes = int(given.get("system.batch_size", 1)), int(given.get("system.gradient_accumulation", 1))
    batch = micro * passes * ranks
    recipe.values |= {"train.global_batch_size": batch, "train.micro_batch_size": micro}
    if "experiment.num_examples_to_see" in given:
        recipe.values["train.max_steps"] = -(-int(given["experiment.num_examples_to_see"]) // batch)
    else:
        recipe.note("experiment.num_examples_to_see", "train.max_steps=")
    if "experiment.save_every" in given:
        every = int(given["experiment.save_every"])
        recipe.values |= {"checkpoint.every_steps": every, "sample.every_steps": every}
    recipe.values["checkpoint.keep_last"] = 1 if given.get("experiment.save_only_most_recent", True) else None
    if given.get("experiment.requeue") is False:
        recipe.values["run.resume"] = "never"
    if "experiment.log_dir" in given and "experiment.name" in given:
        recipe.values["run.dir"] = f"{str(given['experiment.log_dir']).rstrip('/')}/{given['experiment.name']}"


def _rest(given: Mapping[str, Any], recipe: Recipe) -> None:
    if "tracker.project" in recipe.values:
        recipe.groups["tracker"] = "wandb"
    scheduler = str(given.get("lr_scheduler.scheduler", "ConstantWithWarmup"))
    recipe.groups["lr_scheduler"] = TABLE["schedulers"].get(scheduler, "constant")
    if scheduler not in TABLE["schedulers"]:
        recipe.note("lr_scheduler.scheduler", f"{scheduler}: constant after the warmup", Kind.MISSING)
    if str(given.get("optimizer.name", "adamw")) != "adamw":
        why = f"{given['optimizer.name']}: AdamW in its place; optimizer=torch takes another"
        recipe.note("optimizer.name", why, Kind.MISSING)
    if {"optimizer.params.beta1", "optimizer.params.beta2"} <= given.keys():
        recipe.values["optimizer.algorithm.betas"] = [given[f"optimizer.params.beta{i}"] for i in (1, 2)]
    if given.get("model.use_ema"):
        recipe.values["ema.decay"] = EMA_DECAY
    elif recipe.values.pop("ema.weights", None) is not None:
        recipe.note("model.ema.path", "has no use without model.use_ema", Kind.SAME)
    if given.get("model.xformers"):
        recipe.values["attention"] = "xformers"
    recipe.values["train.precision"] = "bf16" if given.get("model.mixed_precision") == "bf16" else "fp32"
