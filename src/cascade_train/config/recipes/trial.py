"""Whether a recipe composes and passes preflight, before it is written."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.arguments import parameters
from cascade_train.config.launch import compose_root
from cascade_train.config.preflight import EXTRAS, preflight
from cascade_train.config.recipes.recipe import Kind, Recipe, shown
from cascade_train.config.targets import import_target
from cascade_train.errors import ConfigError, install_hint


def settle(recipe: Recipe) -> DictConfig:
    """Compose a recipe's choices, leave out what they do not take or a file must not say, and note what is a default.

    Raises:
        ConfigError: the choices do not compose.
    """
    recipe.confine()
    cfg = _choices(recipe)
    _join_lists(recipe, cfg)
    open_nodes = recipe.asked | ({"objective"} if "model" in recipe.asked else set())
    recipe.defaults = {
        key for key, value in recipe.values.items()
        if key.partition(".")[0] not in open_nodes and OmegaConf.select(cfg, key, default=...) == value
    }  # fmt: skip
    for key in sorted(recipe.values, key=lambda key: not key.endswith("_target_")):
        target, argument = _component(cfg, key)
        if key.endswith("_target_"):
            OmegaConf.update(cfg, key, recipe.values[key], force_add=True)
        elif target is not None and argument not in parameters(import_target(target))[0]:
            node = key.partition(".")[0]
            chosen = f"{node}={recipe.groups[node]}" if node in recipe.groups else target.rpartition(".")[2]
            why = f"{key}={shown(recipe.values[key])} is left out: {chosen} takes no such key"
            why = f"{key}={shown(recipe.values[key])}, where {node}= takes it" if node in recipe.asked else why
            recipe.drop(key, why, Kind.MISSING)
    return cfg


def try_out(recipe: Recipe, source: str, *, ranks: int) -> None:
    """Let preflight check a recipe, and note what is left to the user.

    Raises:
        ConfigError: a value of the trainer's file is refused; names its key there.
    """
    cfg = settle(recipe)
    for key, value in recipe.values.items():
        try:
            OmegaConf.update(cfg, key, value, force_add=True)
        except OmegaConfBaseException as error:
            raise _refused(source, recipe, key, str(error).splitlines()[0]) from error
    _fill(cfg, recipe)
    try:
        preflight(cfg, ranks=ranks)
    except ConfigError as error:
        named = [key for key in recipe.values if re.search(rf"(?<![\w.]){re.escape(key)}(=|:| |\.)", str(error))]
        if named:
            raise _refused(source, recipe, named[0], str(error)) from error
        if __file__ not in str(error):
            recipe.note("a training", f"before it begins: {error}")


def _choices(recipe: Recipe) -> DictConfig:
    """Return what the recipe's choices of groups make."""
    try:
        return compose_root([f"{group}={option}" for group, option in recipe.groups.items()])
    except HydraException as error:
        raise ConfigError(f"the choices {recipe.groups} do not compose: {str(error).splitlines()[0]}.") from error


def _join_lists(recipe: Recipe, cfg: DictConfig) -> None:
    """Make one list of its elements, such as betas.0 and betas.1, where others are those of the default."""
    for key in [key for key in recipe.values if re.search(r"\.\d$", key)]:
        place, _, position = key.rpartition(".")
        value, origin = recipe.values.pop(key), recipe.origins.pop(key)
        default = OmegaConf.select(cfg, place) or []
        listed = list(recipe.values.get(place, default))
        if int(position) < len(listed):
            listed[int(position)] = value
            recipe.put({*recipe.origins.get(place, ()), *origin}, {place: listed})
        else:
            recipe.put(origin, {key: value})
            recipe.drop(key, f"{place} is not an argument of what is chosen", Kind.MISSING)


def _component(cfg: DictConfig, key: str) -> tuple[str | None, str]:
    """Return the class of the innermost component that a key goes to, and the argument of it; None = a typed node."""
    target, argument, node, parts = None, "", cfg, key.split(".")
    for position, part in enumerate(parts):
        inner: Any = node if position == 0 else node.get(parts[position - 1])
        if not isinstance(inner, DictConfig):
            break
        node = inner
        found = None if OmegaConf.is_missing(node, "_target_") else node.get("_target_")
        target, argument = (found, part) if found is not None else (target, argument)
    return target, argument


def _fill(cfg: DictConfig, recipe: Recipe) -> None:
    """Note what is missing, and put something in its place, and in that of libraries that are not here."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        recipe.note(key, f"set it: {key}=...")
        OmegaConf.update(cfg, key, str(Path(__file__)))
    choice = str(cfg.tracker.name)
    if choice in EXTRAS["tracker.name"] and importlib.util.find_spec(EXTRAS["tracker.name"][choice]) is None:
        recipe.note("tracker.name", f"{choice} is not installed here. {install_hint(choice)}.")
        cfg.tracker.name = "none"


def _refused(source: str, recipe: Recipe, key: str, why: str) -> ConfigError:
    origin = ", ".join(recipe.origins.get(key, (key,)))
    return ConfigError(
        f"{source}: {origin} becomes {key} here, and its value is refused: {why.rstrip('.')}. Mend it there."
    )
