"""The config groups and their options: where `conf/` lies, what it offers, what is near to a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

import cascade_train


def conf_dir() -> Path:
    """Return the absolute path of `conf/`: inside an installed wheel, or beside `src/` in a checkout.

    Raises:
        FileNotFoundError: neither place has it.
    """
    package = Path(cascade_train.__file__).resolve().parent
    places = (package / "conf", package.parents[1] / "conf")
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise FileNotFoundError(f"The configuration files are missing from the installation: no config.yaml in {places}.")


def groups() -> list[str]:
    """Return the names of all groups of `conf/`, without those of Hydra itself."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir() and path.name != "hydra")


def group_options(group: str) -> list[str]:
    """Return the options of a group, those of `--config-dir` included; empty where there is no such group."""
    if GlobalHydra.instance().is_initialized():
        names = GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)
    else:
        names = [path.stem for path in (conf_dir() / group).glob("*.yaml")]
    return sorted(name for name in names if not name.startswith("_"))


def option_targets(group: str) -> dict[str, str]:
    """Return the `_target_` of each option that `conf/` itself offers in a group, where its file names one."""
    targets = {}
    for option in group_options(group):
        path = conf_dir() / group / f"{option}.yaml"
        target = OmegaConf.select(OmegaConf.load(path), "_target_") if path.is_file() else None
        if isinstance(target, str):
            targets[option] = target
    return targets


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a sentence that names the nearest known name, or all of them; empty where nothing is known."""
    names = [str(other) for other in known]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f" Did you mean {prefix}{near[0]}?"
    return f" Known here: {', '.join(names)}." if names else ""
