"""What the keys of open-diffusion's file mean here, by open_diffusion.yaml.

Its network, Stable Diffusion's, has no equivalent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cascade_train.config.recipes.recipe import Recipe, load_table

TABLE = load_table("open_diffusion")
EMA_DECAY = 0.9999


def is_open_diffusion(source: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of open-diffusion's."""
    return {"system", "experiment", "dataset"} <= source.keys()


def from_open_diffusion(source: Mapping[str, Any], *, ranks: int, model: str) -> Recipe:
    """Translate one configuration, full training of `model` instead of its own network.

    In `source` interpolations are resolved, and what is left to the user is `???`; its batch size is that of one of the
    `ranks`. `model` is an option of that group.
    """
    flat = {key: value for key, value in _flatten(source) if ".filters." not in key}
    given = {key: value for key, value in flat.items() if value is not None and value != "???"}
    recipe = Recipe(groups={"task": "finetune", "model": model, "data": "webdataset"})
    recipe.take(given, TABLE)
    filters = (source["dataset"].get("params") or {}).get("filters")
    if filters:
        recipe.values["data.row_filters"] = dict(filters)
    _data(flat, recipe)
    _train(given, recipe, ranks)
    _rest(given, recipe)
    if flat.get("experiment.project") == "???":
        recipe.notes["experiment.project"] = "is left to you: tracker.project="
    return recipe


def _data(flat: Mapping[str, Any], recipe: Recipe) -> None:
    kind, path = str(flat.get("dataset.type", "WebDataset")), flat.get("dataset.params.path")
    if kind not in TABLE["datasets"]:
        recipe.notes["dataset.type"] = f"{kind} is none of open-diffusion's; data=webdataset in its place"
    recipe.groups["data"], key = TABLE["datasets"].get(kind, TABLE["datasets"]["WebDataset"])
    if path == "???":
        recipe.notes["dataset.params.path"] = f"is left to you: {key}="
    elif path is not None:
        recipe.values[key] = path
    classes = flat.get("dataset.params.class_mapping")
    if isinstance(classes, str) and classes != "???":
        recipe.values["data.idx_to_prompt"] = classes
    if recipe.groups["data"] == "csv":
        recipe.notes["dataset.type"] = f"{kind}: its columns are data.image_column and data.caption_column here"


def _train(given: Mapping[str, Any], recipe: Recipe, ranks: int) -> None:
    micro, passes = int(given.get("system.batch_size", 1)), int(given.get("system.gradient_accumulation", 1))
    batch = micro * passes * ranks
    recipe.values |= {"train.global_batch_size": batch, "train.micro_batch_size": micro}
    if "experiment.num_examples_to_see" in given:
        recipe.values["train.max_steps"] = -(-int(given["experiment.num_examples_to_see"]) // batch)
    else:
        recipe.notes["experiment.num_examples_to_see"] = "is left to you: train.max_steps="
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
        recipe.notes["lr_scheduler.scheduler"] = f"{scheduler} has no equivalent; constant after the warmup"
    if str(given.get("optimizer.name", "adamw")) != "adamw":
        recipe.notes["optimizer.name"] = f"{given['optimizer.name']}: AdamW in its place; optimizer=torch takes another"
    if {"optimizer.params.beta1", "optimizer.params.beta2"} <= given.keys():
        recipe.values["optimizer.algorithm.betas"] = [given[f"optimizer.params.beta{i}"] for i in (1, 2)]
    if given.get("model.use_ema"):
        recipe.values["ema.decay"] = EMA_DECAY
    elif recipe.values.pop("ema.weights", None) is not None:
        recipe.notes["model.ema.path"] = "has no use without model.use_ema"
    if given.get("model.xformers"):
        recipe.values["attention"] = "xformers"
    recipe.values["train.precision"] = "bf16" if given.get("model.mixed_precision") == "bf16" else "fp32"


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
