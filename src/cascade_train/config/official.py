"""Stable Cascade's own training files (`configs/training/*.yaml`) as experiments of this library.

What their keys mean here, and what the original does where a file is silent. A file may set neither commands
(`pipe:`), interpolations (`${`) nor classes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.arguments import parameters
from cascade_train.config.captions_getter import caption_keys
from cascade_train.config.launch import compose_root
from cascade_train.config.targets import import_target
from cascade_train.errors import ConfigError
from cascade_train.files.durable import to_yaml

MODELS = {"3.6B": "c_3b", "1B": "c_1b", "3B": "b_3b", "700M": "b_700m"}
FILTERS = {
    "CannyFilter": "canny",
    "InpaintFilter": "inpaint",
    "SRFilter": "sr",
    "SREffnetFilter": "sr_effnet",
    "IdentityFilter": "identity",
    "QRFilter": "qr",
    "PidiFilter": "sketch",
}
FILTER_FILES = {
    "InpaintFilter": "its saliency network is task.filter.weights=saliency_model.pt; null draws holes at random",
    "IdentityFilter": "its networks are task.filter.detector=det_10g.onnx and task.filter.recogniser=w600k_r50.onnx",
    "PidiFilter": "its network is task.filter.weights=table5_pidinet.pth",
}
"""Files of the original's filters, and the keys that name them here."""

KEYS: dict[str, tuple[str, ...]] = {
    "experiment_id": ("run.name",),
    "image_size": ("model.image_size",),
    "updates": ("train.max_steps",),
    "lr": ("optimizer.lr",),
    "warmup_updates": ("lr_scheduler.warmup_steps",),
    "backup_every": ("checkpoint.keep_every_steps",),
    "save_every": ("checkpoint.every_steps", "sample.every_steps"),
    "multi_aspect_ratio": ("data.aspect_ratios",),
    "webdataset_path": ("data.urls",),
    "dataset_filters": ("data.row_filters",),
    "generator_checkpoint_path": ("model.weights",),
    "effnet_checkpoint_path": ("model.semantic_compressor.weights",),
    "previewer_checkpoint_path": ("model.previewer.weights",),
    "stage_a_checkpoint_path": ("model.stage_a.weights",),
    "lora_checkpoint_path": ("task.weights",),
    "controlnet_checkpoint_path": ("task.weights",),
    "module_filters": ("task.module_filters",),
    "rank": ("task.rank",),
    "train_tokens": ("task.train_tokens",),
    "controlnet_blocks": ("task.blocks",),
    "controlnet_bottleneck_mode": ("task.bottleneck",),
    "offset_noise": ("objective.offset_noise",),
    "ema_beta": ("ema.decay",),
    "wandb_project": ("tracker.project",),
    "wandb_entity": ("tracker.entity",),
}
"""Keys whose value is that of one of ours or several."""

UNNEEDED = {
    "model_version": "model= brings the network, its text encoders, its autoencoder and its schedule",
    "output_path": "a run logs, saves and samples into its own folder, run.dir",
    "dtype": "trained weights stay fp32, frozen ones bf16; compute is train.precision",
    "shift": "the original reads it and trains with 1; objective.shift would shift for real",
}
READ = {
    "batch_size", "grad_accum_steps", "checkpoint_path", "captions_getter", "ema_start_iters", "ema_iters", "use_fsdp",
    "edm_objective", "adaptive_loss_weight", "controlnet_filter", "controlnet_filter_params",
}  # fmt: skip
"""Keys that `translate` reads by itself."""

BEHAVIOURS = ("original", "ours")
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
"""The learning rates of the original's recipes are made for these first values at this scale."""
CONFINED = "a file may set no command, no interpolation and no class"


@dataclass(kw_only=True)
class Recipe:
    """An experiment in the making, and what its reader should know."""

    groups: dict[str, str]  # group -> option, in the order of the file
    values: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    origins: dict[str, str] = field(default_factory=dict)  # our key -> the file's
    left: dict[str, str] = field(default_factory=dict)  # the file's key -> why it is left to the user
    unneeded: dict[str, str] = field(default_factory=dict)  # the file's key -> why it has no counterpart
    remark: str = ""  # on the behaviour where the file is silent

    def put(self, key: str, values: Mapping[str, Any]) -> None:
        """Set what a key of the file means, by our keys, except what a file may not set."""
        for ours, value in values.items():
            if any(is_confined(text, ours) for text in (*_texts(value), ours)):
                self.left[key] = CONFINED
            else:
                self.values[ours] = value
                self.origins[ours] = key

    def text(self, *, title: str, command: str) -> str:
        """The experiment's file: what it is, the command that runs it, its choices, its values."""
        tree = OmegaConf.create()
        for key, value in self.values.items():
            OmegaConf.update(tree, key, value, force_add=True)
        comments = [title, command, *textwrap.wrap(self.remark, 118, break_long_words=False)]
        defaults = {"defaults": [{f"override /{group}": option} for group, option in self.groups.items()]}
        values: Any = OmegaConf.to_container(tree)
        parts = ["# @package _global_\n", *(f"# {line}\n" for line in comments), to_yaml(defaults)]
        return "".join([*parts, *(f"\n{to_yaml({node: value})}" for node, value in values.items())])

    def report(self) -> list[str]:
        """What became of the file's keys, line by line."""
        taken = [f"  {key}: {ours}={self.values[ours]}" for ours, key in self.origins.items()]
        lines = [self.remark, "Taken over:", *taken]
        for title, notes in (("Not needed here:", self.unneeded), ("Left to you:", self.left)):
            lines += [title, *(f"  {key}: {why}" for key, why in notes.items())] if notes else []
        return lines


def is_confined(text: str, key: str) -> bool:
    """Whether a text could run a command, read more than itself, or name a class."""
    expands = key.endswith("urls") and ":" in text.partition("{")[2]  # {pip,x}e:
    return "${" in text or "pipe:" in text.lower() or expands or bool(re.search(r"(^|\.)_\w+_$", text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def translate(given: Mapping[str, Any], *, ranks: int, behaviour: str) -> Recipe:
    """What a training file of the original means here.

    Args:
        given: its keys.
        ranks: processes that it will run on; it counts samples per process.
        behaviour: what applies where it is silent: original, what its trainer does; or ours.

    Raises:
        ConfigError: it is of another trainer or model, or its numbers do not fit together.
    """
    version = str(given.get("model_version", "")).upper()
    if version not in MODELS:
        raise ConfigError(
            f"model_version={given.get('model_version')} is no model of Stable Cascade ({', '.join(MODELS)}). Give a"
            " training file of its configs/training; docs/migration.md names the keys of other trainers."
        )
    recipe = Recipe(groups={"model": MODELS[version], "task": _task(given), "data": "webdataset"})
    for key, value in given.items():
        if key in KEYS:
            recipe.put(key, dict.fromkeys(KEYS[key], value))
        elif key in UNNEEDED:
            recipe.unneeded[key] = UNNEEDED[key]
        elif key not in READ:
            recipe.left[key] = "unknown, so nothing was taken from it"
    passes, size = (_whole(given, key) for key in ("grad_accum_steps", "batch_size"))
    if size % (passes * ranks):
        raise ConfigError(
            f"batch_size={size} does not divide into grad_accum_steps={passes} passes of {ranks} ranks. Give the ranks"
            " that the file was written for: ranks=…"
        )
    recipe.put("batch_size", {"train.global_batch_size": size})
    recipe.put("grad_accum_steps", {"train.micro_batch_size": size // (passes * ranks)} if passes > 1 else {})
    if path := given.get("checkpoint_path"):
        below = given.get("experiment_id")
        recipe.put("checkpoint_path", {"run.dir": f"{str(path).rstrip('/')}/{below}" if below else path})
    if given.get("wandb_project"):
        recipe.groups["tracker"] = "wandb"
    if given.get("use_fsdp"):
        recipe.groups["parallel"] = "fsdp"
    _objective(recipe, given)
    _average(recipe, given, passes)
    _captions(recipe, given.get("captions_getter"))
    _control(recipe, given)
    _urls(recipe, given.get("webdataset_path"))
    is_stage_b = recipe.groups["model"].startswith("b_")
    sampler = {"sample.steps": 10, "sample.guidance_scale": 1.5} if is_stage_b else {"sample.guidance_scale": 5.0}
    recipe.values |= {"model.weights": recipe.values.get("model.weights"), **sampler}
    _behaviour(recipe, given, is_stage_b=is_stage_b, fills=behaviour == "original")
    _check(recipe)
    return recipe


def _task(given: Mapping[str, Any]) -> str:
    if given.get("controlnet_blocks"):
        return "controlnet"
    if given.get("module_filters"):
        return "lora"
    return "finetune" if MODELS[str(given["model_version"]).upper()].startswith("c_") else "reconstruction"


def _whole(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number, 1 or more: it counts. Mend it in the file.")
    return int(value)


def _objective(recipe: Recipe, given: Mapping[str, Any]) -> None:
    if given.get("adaptive_loss_weight"):
        recipe.groups["objective"] = "adaptive"
        if given.get("edm_objective"):
            recipe.values["objective.target._target_"] = "cascade_train.diffusion.target.VTarget"
            recipe.origins["objective.target._target_"] = "edm_objective"
    elif given.get("edm_objective"):
        recipe.groups["objective"] = "v"


def _average(recipe: Recipe, given: Mapping[str, Any], passes: int) -> None:
    """The original counts micro-batches, and does not ramp the decay."""
    recipe.values["ema.ramp"] = False
    if given.get("ema_beta"):
        recipe.put("ema_start_iters", {"ema.start_step": int(given.get("ema_start_iters") or 0) // passes + 1})
        recipe.put("ema_iters", {"ema.every_steps": max(1, int(given.get("ema_iters") or 1) // passes)})


def _captions(recipe: Recipe, getter: Any) -> None:
    keys = caption_keys(getter or ("txt", "identity"))
    if keys is None:
        recipe.left["captions_getter"] = (
            f"{getter} is not taken over, and captions are read from .txt: data.captions.key names a key of the json,"
            " or several with weights, and data.captions.template joins texts"
        )
    else:
        recipe.put("captions_getter", keys)


def _control(recipe: Recipe, given: Mapping[str, Any]) -> None:
    name = given.get("controlnet_filter")
    if name is None:
        return
    recipe.groups["filter@task.filter"] = FILTERS.get(name, "own")
    if name not in FILTERS:
        why = f"{name} is no filter of the original: name your class by task.filter._target_ (docs/add-a-filter.md)"
        recipe.left["controlnet_filter"] = why
    elif name in FILTER_FILES:
        recipe.left[f"controlnet_filter {name}"] = FILTER_FILES[name]
    for argument, value in (given.get("controlnet_filter_params") or {}).items():
        recipe.put("controlnet_filter_params", {f"task.filter.{argument.replace('thresold', 'threshold')}": value})
    if given.get("controlnet_bottleneck_mode", "effnet") == "effnet":
        recipe.values["task.backbone_weights"] = "imagenet"


def _urls(recipe: Recipe, urls: Any) -> None:
    if isinstance(urls, str) and urls.strip().endswith(".yml"):
        recipe.left["webdataset_path"] = f"data.urls=[...], the entries of {urls}"
        recipe.values.pop("data.urls", None)
        recipe.origins.pop("data.urls", None)
    for url in [urls] if isinstance(urls, str) else urls or []:
        if str(url).startswith("s3:"):
            recipe.left["webdataset_path on s3"] = "s3:// is read through boto3, install the extra s3"
        elif str(url).startswith("http"):
            recipe.left["webdataset_path on the web"] = f"{url} is not read by itself: stream it through curl"


def _behaviour(recipe: Recipe, given: Mapping[str, Any], *, is_stage_b: bool, fills: bool) -> None:
    """Set the keys that make this library do as the original, or name them."""
    buckets = {"data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
    several = buckets if "multi_aspect_ratio" in given else {}
    values: dict[str, Any] = {"data.replacement": True, "data.crop": "random" if several else "saliency"}
    values |= {"optimizer.decay": "all", "lr_scheduler.from_zero": True}
    values |= {"objective.noise.square_grids": True} if is_stage_b else {"model.image_encoder.antialias": False}
    values |= several
    if given.get("adaptive_loss_weight"):
        values |= {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
    values |= ADAPTERS if recipe.groups["task"] == "lora" else {}
    keys = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    recipe.remark = f"behaviour=ours: left to this library (docs/differences.md). behaviour=original sets {keys}."
    if fills:
        recipe.values |= values
        recipe.remark = (
            f"behaviour=original: set as the original trainer does, where this library does otherwise: {keys}. What has"
            " no key is in docs/differences.md. behaviour=ours leaves these to this library."
        )


def _check(recipe: Recipe) -> None:
    """Leave out what the chosen components do not take; a ConfigError names a key whose value has the wrong type."""
    cfg = compose_root([f"{group}={option}" for group, option in recipe.groups.items()])
    for key, value in [*recipe.values.items()]:
        target, argument = _component(cfg, key)
        if target is not None and argument not in parameters(import_target(target))[0]:
            recipe.left[recipe.origins.pop(key, key)] = f"{key}={value} is left out: {target} takes no such key"
            del recipe.values[key]
            continue
        try:
            OmegaConf.update(cfg, key, value, force_add=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{recipe.origins.get(key, key)}: {key}={value}: {reason}. Mend it in the file."
            ) from error


def _component(cfg: DictConfig, key: str) -> tuple[str | None, str]:
    """The class of the innermost component that a key goes to, None for a typed node, and the argument of it."""
    node: Any = cfg
    target, argument = None, ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            break
        if not OmegaConf.is_missing(node, "_target_") and node.get("_target_") is not None:
            target, argument = node.get("_target_"), part
        node = node.get(part)
    return (None, "") if argument == "_target_" else (target, argument)
