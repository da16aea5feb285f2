"""What the keys of Stable Cascade's own training files (configs/training/*.yaml) mean here, by official.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.config.recipes.captions import caption_keys
from cascade_train.config.recipes.recipe import Recipe, load_table
from cascade_train.errors import ConfigError

TABLE = load_table("official")
FIRST = ("run", "model", "data", "task", "objective", "train", "optimizer", "lr_scheduler", "ema", "parallel")


def is_official(source: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of the original trainer's."""
    return {"experiment_id", "model_version"} <= source.keys()


def from_official(source: Mapping[str, Any], *, ranks: int, behaviour: str) -> Recipe:
    """Translate one configuration.

    Args:
        source: its keys and values.
        ranks: processes that it will run on; the original gives accumulation steps, this library the micro-batch.
        behaviour: whose behaviour is set where the file says nothing, "original" or "ours".

    Raises:
        ConfigError: a model that does not exist, or a batch that does not divide.
    """
    given = {key: value for key, value in source.items() if value is not None}
    recipe = Recipe(groups=_groups(given))
    recipe.take(given, TABLE)
    recipe.values |= _values(given, ranks) | _ema(given) | _control(given)
    _note(given, recipe)
    switches = original_behaviour(given, task=recipe.groups["task"], is_stage_b=_is_stage_b(given))
    recipe.values |= switches if behaviour == "original" else {}
    recipe.remarks.append(describe(behaviour, switches))
    order = {node: number for number, node in enumerate(FIRST)}
    recipe.values = dict(sorted(recipe.values.items(), key=lambda item: order.get(item[0].split(".")[0], len(order))))
    return recipe


def _groups(given: Mapping[str, Any]) -> dict[str, str]:
    version = str(given["model_version"])
    if version not in TABLE["models"]:
        raise ConfigError(f"model_version={version} is no model of Stable Cascade: {', '.join(TABLE['models'])} are.")
    chosen = {"task": _task(given), "model": TABLE["models"][version], "data": "webdataset"}
    if "controlnet_filter" in given:
        chosen["filter@task.filter"] = TABLE["filters"].get(str(given["controlnet_filter"]), "own")
    if given.get("adaptive_loss_weight"):
        chosen["objective"] = "adaptive"
    elif given.get("edm_objective"):
        chosen["objective"] = "v"
    if given.get("use_fsdp"):
        chosen["parallel"] = "fsdp"
    if "wandb_project" in given:
        chosen["tracker"] = "wandb"
    return chosen


def _task(given: Mapping[str, Any]) -> str:
    if "controlnet_blocks" in given:
        return "controlnet"
    if "module_filters" in given:
        return "lora"
    return "reconstruction" if _is_stage_b(given) else "finetune"


def _is_stage_b(given: Mapping[str, Any]) -> bool:
    return str(TABLE["models"][str(given["model_version"])]).startswith("b_")


def _values(given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "checkpoint_path" in given:
        values["run.dir"] = f"{str(given['checkpoint_path']).rstrip('/')}/{given['experiment_id']}"
    if "save_every" in given:
        values |= {"checkpoint.every_steps": given["save_every"], "sample.every_steps": given["save_every"]}
    if "generator_checkpoint_path" not in given:
        values["model.weights"] = None
    passes = int(given.get("grad_accum_steps", 1))
    if passes > 1:
        batch = int(given["batch_size"])
        if batch % (passes * ranks):
            raise ConfigError(
                f"batch_size={batch} does not divide into grad_accum_steps={passes} passes of {ranks} ranks. "
                "Give the number of processes: ranks=<number>."
            )
        values["train.micro_batch_size"] = batch // passes // ranks
    if given.get("adaptive_loss_weight") and given.get("edm_objective"):
        values["objective.target._target_"] = "cascade_train.diffusion.target.VTarget"
    values |= caption_keys(given.get("captions_getter", ("txt", "identity"))) or {}
    sampling = (
        {"sample.steps": 10, "sample.guidance_scale": 1.5} if _is_stage_b(given) else {"sample.guidance_scale": 5.0}
    )
    return values | sampling


def _ema(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the average's cadence in optimizer steps; the original counts micro-batches."""
    if "ema_beta" not in given:
        return {}
    passes = int(given.get("grad_accum_steps", 1))
    return {
        "ema.start_step": int(given.get("ema_start_iters", 0)) // passes + 1,
        "ema.every_steps": max(1, int(given.get("ema_iters", 1)) // passes),
    }


def _control(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given.get("controlnet_filter_params") or {}
    values = {f"task.filter.{TABLE['filter_arguments'].get(key, key)}": value for key, value in arguments.items()}
    if "controlnet_filter" in given and given.get("controlnet_bottleneck_mode", "effnet") == "effnet":
        values["task.backbone_weights"] = "imagenet"
    return values


def _note(given: Mapping[str, Any], recipe: Recipe) -> None:
    name = given.get("controlnet_filter")
    if name in TABLE["filter_files"]:
        recipe.notes["controlnet_filter"] = TABLE["filter_files"][name]
    elif name is not None and name not in TABLE["filters"]:
        recipe.notes["controlnet_filter"] = (
            f"{name} is no filter of the original: name your class by task.filter._target_ (docs/add-a-filter.md)"
        )
    if "captions_getter" in given and caption_keys(given["captions_getter"]) is None:
        recipe.notes["captions_getter"] = (
            f"{given['captions_getter']} is not taken over, and captions are read from .txt: data.captions.key names a"
            " key of the json, or several with weights, and data.captions.template puts texts together"
        )
    if "dtype" in given:
        recipe.notes["dtype"] = f"{given['dtype']}: trained weights stay fp32, compute is train.precision"
    urls = given.get("webdataset_path", [])
    if isinstance(urls, str) and urls.strip().endswith(".yml"):
        recipe.notes["webdataset_path"] = (
            f"is left to you: data.urls=[...], the entries of {recipe.values.pop('data.urls')}"
        )
    for url in [urls] if isinstance(urls, str) else urls:
        if url.startswith("s3:"):
            recipe.notes["webdataset_path"] = "s3:// is read through boto3: install the extra s3"
        elif url.startswith("http"):
            recipe.notes["webdataset_path"] = f"{url} is not read by itself: stream it through pipe:curl in data.urls"
    if given.get("edm_objective"):
        recipe.notes["edm_objective"] = (
            "the original cannot load this key; taken as its file's name says: a velocity target"
        )


BEHAVIOURS = ("original", "ours")
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
"""Belong together: the learning rates of the original's recipes are made for these first values at this scale."""


def check_behaviour(behaviour: str | None) -> None:
    """Check the argument `behaviour`.

    Raises:
        ConfigError: no such behaviour.
    """
    if behaviour is not None and behaviour not in BEHAVIOURS:
        raise ConfigError(f"behaviour={behaviour} is unknown: choose {' or '.join(BEHAVIOURS)}.")


def original_behaviour(given: Mapping[str, Any], *, task: str, is_stage_b: bool) -> dict[str, Any]:
    """Return the keys that make this library do as the original, of those that a task reads."""
    several_shapes = "multi_aspect_ratio" in given
    values: dict[str, Any] = {
        "data.replacement": True,
        "data.crop": "random" if several_shapes else "saliency",
        "optimizer.decay": "all",
        "lr_scheduler.from_zero": True,
    }
    values |= {"objective.noise.square_grids": True} if is_stage_b else {"model.image_encoder.antialias": False}
    if several_shapes:
        values |= {"data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
    if given.get("adaptive_loss_weight"):
        values |= {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
    return values | (ADAPTERS if task == "lora" else {})


def describe(behaviour: str, values: Mapping[str, Any]) -> str:
    """Return a sentence on the chosen behaviour, and the values that the original's sets."""
    keys = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    if behaviour == "original":
        return (
            f"behaviour=original: set as the original trainer does, where this library does otherwise: {keys}. What has"
            " no key is in docs/differences.md. behaviour=ours leaves these to this library."
        )
    return f"behaviour=ours: left to this library, docs/differences.md says why. behaviour=original sets {keys}."
