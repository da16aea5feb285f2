"""What ships as a default, and what it should be: the original's numbers, and the choices of this library.

The lists lie in tests/golden/original: published.yaml and recipes.json are the original's,
seeds.json (files) and systems.yaml (code) are other trainers', chosen.yaml is ours.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import cascade_train
from cascade_train.config.groups import conf_dir
from cascade_train.config.recipes.reading import flat
from cascade_train.config.targets import import_target
from cascade_train.data.buckets import parse_ratios
from cascade_train.data.index.row_filter import parse_row_filters
from tests.unit.config.seeds import RECIPES_OF_SEEDS, seed_values
from tests.unit.config.systems import SYSTEM_OF, differing, rows_of

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "original"
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((FOLDER / "published.yaml").read_text())
RECIPES: dict[str, dict[str, Any]] = {
    name.removesuffix(".yaml"): values for name, values in json.loads((FOLDER / "recipes.json").read_text()).items()
}
CHOSEN: list[dict[str, Any]] = yaml.safe_load((FOLDER / "chosen.yaml").read_text())

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


def shipped_files() -> list[str]:
    """Return every file of conf/, without its ending."""
    return sorted(path.relative_to(conf_dir()).with_suffix("").as_posix() for path in conf_dir().rglob("*.yaml"))


def listed(file: str) -> dict[str, Any]:
    """Return what a file's keys should be by either list; ours counts where a key is in both."""
    name = file.removeprefix("experiment/")
    values = recipe_values(name) if name in RECIPES else {}
    values |= seed_values(name) if name in RECIPES_OF_SEEDS else {}
    if name in SYSTEM_OF:
        rows, said = rows_of(SYSTEM_OF[name], name) | differing(name), {*shipped(file), "run.seed"}
        values |= {key: value for key, value in rows.items() if key in said}
    values |= {key: row["value"] for key, row in PUBLISHED.get(file, {}).items()}
    for entry in CHOSEN:
        values |= entry["values"].get(file, {})
    return values


def inherited(file: str) -> dict[str, Any]:
    """Return what a file's keys should be, by the lists of the files that it begins from and its own."""
    return {key: value for each in lineage(file) for key, value in listed(each).items()}


def shipped(file: str) -> dict[str, Any]:
    """Return what a file sets, itself or by the files that it begins from, as `own` does."""
    return {key: value for each in lineage(file) for key, value in own(each).items()}


def own(file: str) -> dict[str, Any]:
    """Return what a file sets, by key, and the options that it chooses, by `defaults.<group>`; not a run's name."""
    node = yaml.safe_load((conf_dir() / f"{file}.yaml").read_text())
    chosen = [each for each in node.pop("defaults", []) if isinstance(each, dict)]
    ignored = ("hydra", "run") if file.startswith(("experiment/", "debug/")) else ("hydra",)
    values = dict(flat({key: value for key, value in node.items() if key not in ignored}))
    for key, option in (pair for each in chosen for pair in each.items()):
        if option not in (None, "???") and "hydra" not in key:
            values["defaults." + key.removeprefix("override ").replace("/", "")] = option
    return values


def lineage(file: str) -> list[str]:
    """Return the files of its group that a file begins from, and the file itself."""
    given = yaml.safe_load((conf_dir() / f"{file}.yaml").read_text()).get("defaults", [])
    beside = [f"{file.rpartition('/')[0]}/{each}" for each in given if isinstance(each, str)]
    return [*(found for each in beside if each in shipped_files() for found in lineage(each)), file]


def defaults(file: str) -> dict[str, Any]:
    """Return the numbers, switches, words and choices of a file, which should be in a list, by key."""
    return only_defaults(own(file))


def only_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a file's values that should be in a list."""
    return {key: value for key, value in values.items() if key.startswith("defaults.") or is_default(key, value)}


def is_default(key: str, value: Any) -> bool:
    """Return whether a value is a number, a switch, a word that chooses, or a list with a number in it."""
    if isinstance(value, list):
        return any(is_default(key, each) for each in value if not isinstance(each, str))
    if isinstance(value, str):
        return re.fullmatch(r"[a-z]\w*", value) is not None and not key.endswith("_target_")
    return isinstance(value, bool | int | float)


def expected(cfg: DictConfig) -> dict[str, Any]:
    """Return what the values of a composition should be, by the lists of the files that it was just composed from."""
    values = listed("config")
    last: dict[str, Any] = {}
    for group, option in HydraConfig.get().runtime.choices.items():
        name, _, package = group.partition("@")
        if option is None or name.startswith("hydra/") or package.startswith("data."):
            continue
        if name in ("experiment", "debug"):
            last |= inherited(f"{name}/{option}")
            continue
        own_values = inherited(f"{name}/{option}")
        values |= {f"{MOUNTS.get(name, f'{name}.')}{key}": value for key, value in own_values.items()}
    return {key: value for key, value in (values | last).items() if "defaults." not in key}


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


# Defaults that live in Python.


def python_defaults() -> dict[str, Any]:
    """Return the numbers and switches that stand where neither YAML nor user say otherwise, by name.

    Those of classes whose fields are arguments of a command or keys of the configuration, and of the classes that
    conf/ names, their bases included.
    """
    root = Path(cascade_train.__file__).parent
    wanted = {cls.__name__ for target in targets() for cls in getattr(import_target(target), "__mro__", ())}
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and (node.name in wanted or node.name.endswith(ARGUMENTS)):
                found |= {f"{module}.{node.name}{key}": ast.literal_eval(value) for key, value in in_class(node)}
    return found


ARGUMENTS = ("Args", "Arguments", "Config")
"""Ends of the names of classes whose fields users set."""


def targets() -> set[str]:
    """Return the classes of this library that conf/ names."""
    nodes = [yaml.safe_load((conf_dir() / f"{file}.yaml").read_text()) for file in shipped_files()]
    found = {str(value) for node in nodes for key, value in flat(node) if key.endswith("_target_")}
    return {target for target in found if target.startswith("cascade_train.")}


def python_module(name: str) -> str:
    """Return the module in which a name such as `module.Class.field` or `module.function(argument)` stands."""
    module = name.partition("(")[0].rpartition(".")[0]
    return module if python_file(module).is_file() else module.rpartition(".")[0]


def python_file(module: str) -> Path:
    """Return the source file of a module below the package."""
    return Path(cascade_train.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")


def python_expression(name: str) -> ast.expr:
    """Return the number or switch in the source that such a name stands for."""
    module = python_module(name)
    owner, dot, field = name.removeprefix(f"{module}.").partition(".")
    owner, bracket, argument = owner.partition("(") if not dot else (owner, "", "")
    for node in ast.parse(python_file(module).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return dict(in_class(node))[f".{field}" if dot else f"({argument}"]
        if isinstance(node, ast.FunctionDef) and node.name == owner:
            return dict(in_function(node))[f"({argument}"]
        if isinstance(node, ast.Assign | ast.AnnAssign) and owner in ast.unparse(node).partition(" =")[0].split(":"):
            return node.value
    raise KeyError(name)


def in_class(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield `.field` or `(argument)` and the number or switch that a class gives it."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign | ast.Assign) and is_number(statement.value):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            yield f".{ast.unparse(target)}", statement.value
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            yield from in_function(statement)


def in_function(node: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield `(argument)` and its default where that is a number or a switch."""
    for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if is_number(value):
            yield f"({argument.arg})", value


def is_number(value: ast.expr | None) -> bool:
    """Return whether an expression is a number or a switch."""
    return isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float)
