"""The config groups and their options: where `conf/` lies, what it offers, what is near to a misspelt name."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import cascade_train

NESTED = {
    "filter": "filter@task.filter",
    "noise": "noise@objective.noise",
    "distance": "distance@objective.distance",
    "times": "times@objective.times",
}
"""Groups whose choice belongs to a component, and not to the root."""


def conf_dir() -> Path:
    """Return the absolute path of `conf/`: inside an installed wheel, or beside `src/` in a checkout."""
    package = Path(cascade_train.__file__).resolve().parent
    places = [package / "conf", package.parents[1] / "conf"]
    if found := [place for place in places if (place / "config.yaml").is_file()]:
        return found[0]
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


def option_files(group: str, folder: Path | None = None) -> dict[str, Any]:
    """Return what the files of a group hold, by option; of `conf/` itself, or of a folder of a user's own."""
    files = {path.stem: path for path in sorted(((folder or conf_dir()) / group).glob("[!_]*.yaml"))}
    held = {option: _held(file, file.stat().st_mtime_ns) for option, file in files.items()}
    return copy.deepcopy(held)


@functools.lru_cache(maxsize=256)
def _held(file: Path, _changed_ns: int) -> Any:
    return OmegaConf.to_container(_merged(file))


def _merged(file: Path) -> Any:
    """Return what a file holds, on top of the files of its group that its defaults name, such as `_base`."""
    own = OmegaConf.load(file)
    given = own.pop("defaults", []) if isinstance(own, DictConfig) else []
    below = [file.with_stem(each) for each in given if isinstance(each, str)]
    places = [each if each.is_file() else conf_dir() / file.parent.name / each.name for each in below]
    return OmegaConf.merge(*(_merged(place) for place in places if place.is_file()), own)


def option_targets(group: str, folder: Path | None = None) -> dict[str, str]:
    """Return the `_target_` of each option that `option_files` finds, where its file names one."""
    targets = {option: file.get("_target_") for option, file in option_files(group, folder).items()}
    return {option: target for option, target in targets.items() if isinstance(target, str)}


def options_with(group: str, key: str) -> list[str]:
    """Return the options of a group whose own files hold `key`, a path below the group."""
    return [option for option, file in option_files(group).items() if key in key_paths(file)]


def chosen(group: str, target: str) -> str:
    """Return how a component was chosen, as `group=option`; by its class where its option is unknown."""
    option = HydraConfig.get().runtime.choices.get(group) if HydraConfig.initialized() else None
    options = [name for name, other in option_targets(group).items() if other == target]
    return f"{group}={option if option in options else options[0]}" if options else f"the {group} {target}"


def typed_keys() -> set[str]:
    """Return the keys and groups that the command line sets; none where Hydra did not start this run."""
    keys = set[str]()
    for override in HydraConfig.get().overrides.task if HydraConfig.initialized() else ():
        name, _, text = override.partition("=")
        keys.add(key := name.lstrip("+~").partition("@")[0])
        if text.startswith("{"):  # a mapping, which sets keys below
            given = OverridesParser.create().parse_override(override).value()
            keys.update(f"{key}.{path}" for path in key_paths(given))
    return keys


def key_paths(node: Any) -> Iterator[str]:
    """Yield the dotted keys of a plain mapping, those of nodes too; of another value, none."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield str(key)
        yield from (f"{key}.{path}" for path in key_paths(value))


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a sentence that names the nearest known name, or all of them; empty where nothing is known."""
    names = [str(other) for other in known]
    return nearest(name, names, prefix) or (f" Known here: {', '.join(names)}." if names else "")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a sentence that names the nearest known name, in any case; empty where none is near."""
    names, wanted = {str(other).lower(): str(other) for other in known}, name.lower()
    beginnings = sorted((other for other in names if len(other) > 3 and wanted.startswith(other)), key=len)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.8) or beginnings[-1:]
    near = near or difflib.get_close_matches(wanted, names, n=1)
    return f" Did you mean {prefix}{names[near[0]]}?" if near else ""


def group_form(path: str, value: Any) -> str:
    """Return the sentence that says how the component at `path` is chosen."""
    parent, _, name = path.rpartition(".")
    root = path.partition(".")[0]
    if parent and name not in groups():
        options = ", ".join(f"{root}={choice}" for choice in group_options(root))
        return f"Choose it by the group {root} ({options}), or name its class by {path}._target_=package.Class."
    option = value if isinstance(value, str) and value.isidentifier() else "<option>"
    near = difflib.get_close_matches(option, group_options(name), n=1) or ["<option>"]
    key = f"{name}@{path}" if parent else path
    return f"Choose it by its group: {key}={near[0]} (options: {', '.join(group_options(name))})."


def unknown_hint(node: str, key: str, known: Iterable[str]) -> str:
    """Return a sentence on an unknown key of a component: the nearest of `known`, or the options that have the key."""
    near = did_you_mean(key, known, f"{node}.")
    options = [] if near.startswith(" Did you mean") else options_with(node, key)
    if not options:
        return near
    of_all = set.intersection(*map(set, option_files(node).values()))
    own = [f"{node}.{each}" for each in known if each not in of_all] if node == "data" else []
    here = f" What is chosen here has {', '.join(own)}." if own else ""
    return f" It is a key of {' and '.join(f'{node}={o}' for o in options)}.{here}"


@functools.cache
def commands() -> dict[str, str]:
    """Return the commands by name, each with the first line of its file."""
    files = sorted((Path(cascade_train.__file__).parent / "commands").glob("[!_]*.py"))
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_bytes())) or "" for file in files}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}
