"""The configuration that a run or an export left, or that published weights have, checked before anything is built.

A run folder may come from someone else: which classes it may name is decided here, not by the folder.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.groups import group_options, groups, option_files
from cascade_train.config.launch import compose_root
from cascade_train.config.preflight import leaves, preflight
from cascade_train.config.schema import ParallelConfig, ParallelMode, Root
from cascade_train.config.sweeps.runs import key_of
from cascade_train.config.targets import components_in, is_trusted
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import is_run, no_checkpoint_yet
from cascade_train.files.untrusted import check_yaml, read_regular

CONFIG_NAME = "config.yaml"
SINGLE_RANK = ParallelConfig(mode=ParallelMode.single, shard_size=None, reshard_after_forward=True, cpu_offload=False)
"""Settings of the one rank that reads a run, whatever ranks and devices trained it."""
INSPECTED_NODES = ("model", "task", "objective")
"""Components that are constructed to read results; the others may be of packages that are not installed."""


def load_saved_config(folder: Path, *, allow_any_target: bool = False, key: str = "from") -> DictConfig:
    """Return the checked configuration of a run or of its export.

    `allow_any_target` allows classes of any package; `key` is the argument that named the folder.

    Raises:
        ConfigError: no such folder, no configuration in it, or one that does not pass preflight.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        reason = "no such folder" if not folder.is_dir() else f"no {CONFIG_NAME} in it"
        raise ConfigError(f"{key}={folder}: {reason}. Name the folder of a run, or the export/ that it left.")
    saved = load_yaml(path)
    if not allow_any_target:
        _check_trusted(OmegaConf.to_container(saved, resolve=False), path)
    cfg = OmegaConf.merge(OmegaConf.structured(Root), saved)
    assert isinstance(cfg, DictConfig)
    cfg.run.allow_any_target = True  # checked already, and closer
    cfg.parallel = SINGLE_RANK
    return preflight(cfg, ranks=1, components=INSPECTED_NODES)


def load_yaml(path: Path) -> DictConfig | ListConfig:
    """Return what a YAML file from elsewhere holds, interpolations as they are.

    Raises:
        ConfigError: it cannot be read, or is nested or repeated without end.
    """
    try:
        text = read_regular(path).decode()
        check_yaml(text)
        return OmegaConf.load(io.StringIO(text))
    except (ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{path} cannot be read as YAML: {reason}. Give another file, or mend it.") from error


def _check_trusted(saved: Any, path: Path) -> None:
    """Check that a saved configuration refers to nothing outside it, and names classes that cannot be misused."""
    for key, value in leaves(saved):
        if "${" in str(value):
            raise ConfigError(
                f"{path}: {key} holds an interpolation, which a run never writes and which could read this machine's "
                "environment. Write the value itself, or, if you trust the folder: allow_any_target=true."
            )
    for _, each in components_in("", saved):
        if not is_trusted(str(each["_target_"])):
            raise ConfigError(
                f"{path} names {each['_target_']}, which is none of this library's components or torch's optimizers: a "
                "folder of someone else could run anything by it. If you trust it: allow_any_target=true."
            )


def export_folder(folder: Path, *, key: str = "from") -> Path:
    """Return the export of a run, or the folder itself where it is an export.

    Raises:
        ConfigError: the run has not written its export; names `key`, the argument that named the folder.
    """
    if (folder / "export").is_dir():
        return folder / "export"
    if is_run(folder):
        reason = no_checkpoint_yet(folder) or (
            f"this run has not written its export yet. Let it finish, or run cascade-train export from={folder}."
        )
        raise ConfigError(f"{key}={folder}: {reason}")
    return folder


def published_config(model: str, weights: str) -> DictConfig:
    """Return the checked configuration that a run of this size would have; a tiny one's is that of its recipe."""
    task = "reconstruction" if model.startswith("b_") else "finetune"
    overrides = [f"model={model}", f"task={task}", "run.name=published", "train.global_batch_size=1"]
    changed: dict[str, Any] = {"model.weights": weights}
    if model.endswith("_tiny"):  # the recipe that trained the packaged weights is called tiny_<size>
        overrides.append(f"experiment=tiny_{model.removesuffix('_tiny')}")
        parts = option_files("model")[model].items()  # a recipe's text towers begin from nothing, these are trained
        changed |= {f"model.{name}": part for name, part in parts if name.startswith("text_encoder")}
    return composed(overrides, changed)


def composed(
    overrides: list[str], changed: Mapping[str, Any] = MappingProxyType({}), *, may_miss: bool = False
) -> DictConfig:
    """Return the checked configuration of a look at what overrides name; `changed` are values by dotted key.

    `may_miss`: of what nobody has set, such as the place of the data, only what belongs to the model counts.
    """
    cfg = compose_root(overrides, for_run=False)
    for key in OmegaConf.missing_keys(cfg) if may_miss else ():
        if not key.startswith("model.") and not key.endswith("_target_"):
            OmegaConf.update(cfg, key, "unset")
    for key, value in changed.items():
        OmegaConf.update(cfg, key, value)
    cfg.parallel = SINGLE_RANK
    return preflight(cfg, ranks=1, components=INSPECTED_NODES)


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as plain values, interpolations resolved, enums by their names."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)  # type: ignore[assignment]
    return plain


def recipe_of(overrides: Sequence[str], saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a run's configuration was before single keys were set, as plain values by the choices as typed.

    `overrides` are those of the run's command line; of `saved`, its configuration, name and directory are taken. Empty
    where the choices, perhaps of another version, cannot be composed.
    """
    keyed = [(key_of(each).partition("@")[0], each) for each in overrides]
    choices = tuple(each for key, each in keyed if key in groups() and each.partition("=")[2] in group_options(key))
    hydra = GlobalHydra.instance()
    search_path = str(hydra.config_loader().get_search_path()) if hydra.is_initialized() else None
    try:
        cfg = _composed(choices, search_path).copy()
        cfg.run.update({key: saved["run"][key] for key in ("name", "dir")})
        return {" ".join(choices) or "the defaults": to_plain(cfg)}
    except (HydraException, OmegaConfBaseException, LookupError, TypeError):
        return {}


@functools.lru_cache(maxsize=64)
def _composed(choices: tuple[str, ...], search_path: str | None) -> DictConfig:
    """Compose choices alone, in the running application of Hydra, which has a search path, where there is one."""
    return compose_root(choices, for_run=False) if search_path is None else compose("config", [*choices])
