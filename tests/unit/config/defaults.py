"""The original's numbers, and what holds a composition to them.

The lists lie in tests/golden/original: published.yaml has its models, objectives, optimizer, tasks and filters,
recipes.json its training files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.data.buckets import parse_ratios
from cascade_train.data.index.row_filter import parse_row_filters

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "original"
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((FOLDER / "published.yaml").read_text())
RECIPES: dict[str, dict[str, Any]] = {
    name.removesuffix(".yaml"): values for name, values in json.loads((FOLDER / "recipes.json").read_text()).items()
}

MOUNTS = {
    "noise": "objective.noise.",
    "distance": "objective.distance.",
    "times": "objective.times.",
    "filter": "task.filter.",
    "hydra": "hydra.launcher.",
}
"""Where a group's options go; others go into the node of their name."""

MODELS = {"3.6B": "c_3b", "1B": "c_1b", "3B": "b_3b", "700M": "b_700m"}
FILTERS = {
    "CannyFilter": "canny",
    "InpaintFilter": "inpaint_saliency",
    "SREffnetFilter": "sr_effnet",
    "IdentityFilter": "identity",
}
SAME = {
    "experiment_id": ("run.name",),
    "image_size": ("model.image_size", "data.image_size"),
    "batch_size": ("train.global_batch_size",),
    "updates": ("train.max_steps",),
    "save_every": ("checkpoint.every_steps", "sample.every_steps"),
    "backup_every": ("checkpoint.keep_every_steps",),
    "lr": ("optimizer.lr",),
    "warmup_updates": ("lr_scheduler.warmup_steps",),
    "multi_aspect_ratio": ("data.aspect_ratios",),
    "dataset_filters": ("data.row_filters",),
    "offset_noise": ("objective.offset_noise",),
    "rank": ("task.rank",),
    "module_filters": ("task.module_filters",),
    "train_tokens": ("task.train_tokens",),
    "controlnet_blocks": ("task.blocks",),
    "controlnet_bottleneck_mode": ("task.bottleneck",),
    "generator_checkpoint_path": ("model.weights",),
    "effnet_checkpoint_path": ("model.semantic_compressor.weights",),
    "previewer_checkpoint_path": ("model.previewer.weights",),
    "stage_a_checkpoint_path": ("model.stage_a.weights",),
}
"""Keys of the original's files whose value ours have too."""

UNSET = {
    "multi_aspect_ratio": None,
    "dataset_filters": None,
    "captions_getter": ["txt", "identity"],
    "adaptive_loss_weight": False,
    "edm_objective": False,
}
"""What the original takes for keys that a file leaves out, where our default might be another."""


def recipe_values(name: str, *, imported: bool = False) -> dict[str, Any]:
    """Return what an official file says in our keys; imported: its own name and paths too.

    Raises:
        KeyError: a key of the file that nothing here translates.
    """
    given = UNSET | RECIPES[name]
    model, task = MODELS[given.pop("model_version")], _task(given)
    mode = given.get("controlnet_bottleneck_mode", "effnet") if task == "controlnet" else None
    values = {f"model.{key}": row["value"] for key, row in PUBLISHED[f"model/{model}"].items()}
    for key, row in PUBLISHED["recipe"].items():
        if key.partition("/")[0] in (model[0], task, mode):
            values[key.partition("/")[2]] = row["value"]
    adaptive, passes = given.pop("adaptive_loss_weight"), given.pop("grad_accum_steps")
    chosen = {"model": model, "task": task, "data": "webdataset", "objective": "adaptive" if adaptive else "gdf"}
    chosen["parallel"] = values["parallel.mode"] = "fsdp" if given.pop("use_fsdp") else "auto"
    values |= {
        "train.micro_batch_size": None if passes == 1 else given["batch_size"] // passes,
        "objective.loss_weight._target_": _class("loss_weight", "AdaptiveLossWeight" if adaptive else "P2LossWeight"),
        "objective.target._target_": _class("target", "VTarget" if given.pop("edm_objective") else "EpsilonTarget"),
    }
    values["data.captions.key"], reader = given.pop("captions_getter")
    assert reader == "identity"
    given.pop("shift", None)  # which the original reads, and does not use
    values["objective.shift"] = PUBLISHED["objective/gdf"]["shift"]["value"]
    if mode is not None:
        values["task.bottleneck"] = mode
        chosen["filter@task.filter"] = FILTERS[given.pop("controlnet_filter")]
        arguments = given.pop("controlnet_filter_params")
        values |= {f"task.filter.{each.replace('thresold', 'threshold')}": value for each, value in arguments.items()}
    for key, value in given.items():
        values |= dict.fromkeys(SAME[key], value)
    return values | {f"defaults.{group}": option for group, option in chosen.items()} | _own(name, given, imported)


def _own(name: str, given: Mapping[str, Any], imported: bool) -> dict[str, str]:
    """Return the run's name and where frozen weights come from, which a recipe that ships has from elsewhere."""
    if imported:
        return {}
    published = PUBLISHED[f"model/{MODELS[RECIPES[name]['model_version']]}"]["weights"]["value"]
    repository = PUBLISHED["model/b_3b"]["weights"]["value"].partition(":")[0]
    files = {SAME[key][0]: f"{repository}:{Path(given[key]).name}" for key in SAME if key in given
             and key.endswith("checkpoint_path")}  # fmt: skip
    return {**files, "run.name": name, "model.weights": published}


def _task(given: Mapping[str, Any]) -> str:
    """Return the task of the script that reads a file."""
    if "controlnet_blocks" in given:
        return "controlnet"
    if "module_filters" in given:
        return "lora"
    return "reconstruction" if "stage_a_checkpoint_path" in given else "finetune"


def _class(module: str, name: str) -> str:
    return f"cascade_train.diffusion.{module}.{name}"


def differences(cfg: DictConfig, values: Mapping[str, Any]) -> list[str]:
    """Return the keys in which a composition is not what it should be."""
    cfg = cfg.copy()
    OmegaConf.resolve(cfg)
    plain = dict(leaves_and_nodes(OmegaConf.to_container(cfg)))
    return [
        f"{key}={plain.get(key, 'absent')}, should be {value}"
        for key, value in values.items()
        if canonical(key, plain.get(key, "absent")) != canonical(key, value)
    ]


def leaves_and_nodes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and value of every node below this one."""
    for name, value in node.items():
        key = f"{path}.{name}" if path else str(name)
        yield key, value
        if isinstance(value, Mapping):
            yield from leaves_and_nodes(value, key)


def canonical(key: str, value: Any) -> Any:
    """Return a value so that those that mean the same are equal."""
    if key == "data.aspect_ratios" and value not in (None, "absent"):
        return parse_ratios(value)
    if key == "data.row_filters" and value not in (None, "absent"):
        numbers = {int(number) for number in re.findall(r"\d+", str(value))}
        probes = [json.dumps({"width": w, "height": 10_000}) for n in numbers for w in (n - 1, n, n + 1)]
        probes += [json.dumps({"width": 10_000, "height": h}) for n in numbers for h in (n - 1, n, n + 1)]
        return sorted(numbers), [parse_row_filters(value).verdicts(probe.encode()) for probe in probes]
    return (type(value) is bool, value)
