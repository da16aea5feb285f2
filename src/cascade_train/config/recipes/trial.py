"""Whether a recipe composes and passes preflight, before it is written."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.groups import conf_dir
from cascade_train.config.hydra_compat import BASE
from cascade_train.config.launch import register_schema
from cascade_train.config.preflight import EXTRAS, preflight
from cascade_train.config.recipes.recipe import Recipe
from cascade_train.errors import ConfigError, install_hint

INSTEAD = {"tracker.name": "none", "attention": "sdpa"}
"""What is tried where the library of a choice is not on this machine."""


def try_out(recipe: Recipe, source: str, *, ranks: int) -> None:
    """Compose a recipe and let preflight check it; note which values are the defaults, and what is left to the user.

    Raises:
        ConfigError: a value of the trainer's file is refused; names its key there.
    """
    cfg = _choices(recipe)
    for key, value in recipe.values.items():
        origin = recipe.origins.get(key, key)
        if OmegaConf.select(cfg, key, default=...) == value:
            recipe.defaults.add(key)
        try:
            OmegaConf.update(cfg, key, value, force_add=True)
        except OmegaConfBaseException as error:
            raise _refused(source, origin, key, str(error).splitlines()[0]) from error
    _fill(cfg, recipe)
    try:
        preflight(cfg, ranks=ranks)
    except ConfigError as error:
        named = [key for key in recipe.values if re.search(rf"(?<![\w.]){re.escape(key)}(=|:| |\.)", str(error))]
        if not named:
            recipe.note("a training", f"before it begins: {error}")
        else:
            raise _refused(source, recipe.origins.get(named[0], named[0]), named[0], str(error)) from error


def _choices(recipe: Recipe) -> DictConfig:
    """Return what the recipe's choices of groups make."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), **BASE):
        try:
            cfg = compose("config", [f"{g}={o}" for g, o in recipe.groups.items()], return_hydra_config=True)
        except HydraException as error:
            raise ConfigError(f"the choices {recipe.groups} do not compose: {str(error).splitlines()[0]}.") from error
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _fill(cfg: DictConfig, recipe: Recipe) -> None:
    """Note what is missing, and put something in its place, and in that of libraries that are not here."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        recipe.note(key, f"set it: {key}=...")
        OmegaConf.update(cfg, key, str(Path(__file__)))
    for key, libraries in EXTRAS.items():
        choice = str(OmegaConf.select(cfg, key))
        if choice in libraries and importlib.util.find_spec(libraries[choice]) is None:
            recipe.note(key, f"{choice} is not installed here. {install_hint(choice)}.")
            OmegaConf.update(cfg, key, INSTEAD[key])


def _refused(source: str, origin: str, key: str, why: str) -> ConfigError:
    return ConfigError(
        f"{source}: {origin} becomes {key} here, and its value is refused: {why.rstrip('.')}. Mend it there."
    )
