"""Download what models and evaluations need, and check it.

cascade-train download c_3b b_3b inception clip
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cascade_train.commands.parts.command_line import Command, with_defaults
from cascade_train.config.groups import did_you_mean, option_targets
from cascade_train.config.launch import parser
from cascade_train.config.overrides import searching
from cascade_train.config.saved import composed
from cascade_train.config.targets import class_constant
from cascade_train.errors import ConfigError
from cascade_train.files.hub import WebFile, announced_hash, free_bytes, unavailable
from cascade_train.models.formats.weights_source import WeightsSpec, hub_names, local_path
from cascade_train.results.evaluation.published import NETWORKS

MIB = 2**20


@dataclass(kw_only=True)
class DownloadArgs:
    """Download what models need from the hub at the revisions that they name, and the networks of evaluations.

    Models and networks are words (c_3b b_3b inception clip vgg16); keys of a training (task=lora model=c_3b, or
    experiment=finetune_c_3b) name what that training needs, and --config-dir a folder with options of your own.
    """

    dry_run: bool = False
    """Only show what would be downloaded, what is there already, and the room that is left."""


@dataclass(frozen=True)
class _Item:
    """A file to download: its address, its size in bytes, whether it is here, and the key that names it."""

    where: str
    size: int
    is_here: bool
    origin: str
    fetch: Callable[[], bool]  # returns whether there is a hash that it was compared with
    disk: tuple[Path, int]  # the folder that it goes to, and the space there


def download(args: DownloadArgs, rest: list[str]) -> int:
    """Print what is needed, download what is missing, check all of it against the hub's hashes, and return 0."""
    items = _items(rest)
    for item in items:
        sys.stdout.write(f"{item.size / MIB:10,.1f} MiB  {'here    ' if item.is_here else 'to fetch'}  {item.where}\n")
    for folder, free in dict([item.disk for item in items] or [free_bytes()]).items():
        missing = sum(item.size for item in items if not item.is_here and item.disk[0] == folder)
        sys.stdout.write(f"To fetch: {missing / MIB:,.1f} MiB. Free for {folder}: {free / MIB:,.1f} MiB.\n")
        sys.stdout.flush()
        if missing > free:
            raise ConfigError(
                f"{missing / MIB:,.1f} MiB do not fit into {folder}, which has {free / MIB:,.1f} MiB. Free space, or "
                "set HF_HOME (of the hub) or TORCH_HOME (of torch.hub) to a folder on another disk."
            )
    if args.dry_run:
        return 0
    compared = 0
    for item in items:
        with _named(item.origin):
            compared += item.fetch()
    unknown = len(items) - compared
    left = f" {unknown} more are here, but the cache holds no hash to compare them with;" if unknown else ""
    sys.stdout.write(f"{compared} files are here and match their hashes;{left} HF_HUB_OFFLINE=1 works from now on.\n")
    for name in [word for word in rest if word in NETWORKS]:
        key, network = NETWORKS[name]
        if isinstance(network, WebFile):
            path = network.path
        else:
            source, names = hub_names(network)
            path = source.fetch(names[0]).parent
        sys.stdout.write(f"evaluate takes {name} as {key}={path}\n")
    return 0


@contextmanager
def _named(origin: str) -> Iterator[None]:
    """Raise failures of the client and the network as ConfigErrors that name the key."""
    try:
        yield
    except Exception as error:
        raise unavailable(origin, error) from error


def _items(rest: list[str]) -> list[_Item]:
    """Return each file once, in the order in which models load them, and then the networks of evaluations."""
    from cascade_train.assembly import components, model  # heavy: torch and everything above it

    found: list[_Item] = []
    for overrides in runs_of(*with_config_dir(rest)):
        cfg = composed(overrides, may_miss=True)
        for spec in model.weight_specs(cfg, components.build_parts(cfg)):
            found += [] if local_path(spec.source).exists() else _of_hub(spec)
    for key, network in [NETWORKS[word] for word in rest if word in NETWORKS]:
        found += _of_hub(network) if isinstance(network, WeightsSpec) else [_of_web(key, network)]
    return list({item.where: item for item in found}.values())


def _of_hub(spec: WeightsSpec) -> Iterator[_Item]:
    """Yield the files of a spec that names the hub."""
    source, names = hub_names(spec)
    origin = f"{spec.key}={spec.source}"

    def fetch(name: str) -> bool:
        return announced_hash(source.fetch(name, verify=True)) is not None

    for name in names:
        with _named(origin):
            info = source.look(name)
        if info is None:
            raise ConfigError(f"{origin}: {source.repo} has no {name} at {source.asked}; name another file")
        where = f"{source.repo}@{(source.commit or source.asked)[:12]}:{name}"
        yield _Item(where, info.file_size or 0, info.is_cached, origin, partial(fetch, name), free_bytes())


def _of_web(key: str, file: WebFile) -> _Item:
    origin, disk = f"{key}={file.url}", free_bytes(file.path.parent)
    with _named(origin):
        size = file.size()
    return _Item(file.url, size, file.path.is_file(), origin, lambda: file.fetch().is_file(), disk)


def with_config_dir(rest: list[str]) -> tuple[list[str], Path | None]:
    """Return the arguments that are no flags, and the folder of `--config-dir`; a ConfigError where there is none."""
    arguments = parser().parse_intermixed_args(rest)
    if arguments.config_dir is None:
        return arguments.overrides, None
    folder = Path(arguments.config_dir).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {arguments.config_dir}: no such folder.")
    return arguments.overrides, folder


def runs_of(rest: list[str], config_dir: Path | None = None) -> list[list[str]]:
    """Return the overrides of the training of each model that is named, or of the one that the arguments are."""
    words = [argument for argument in rest if "=" not in argument and argument not in NETWORKS]
    given = [argument for argument in rest if "=" in argument]
    targets = option_targets("model") | ({} if config_dir is None else option_targets("model", config_dir))
    if not rest:
        raise ConfigError(
            f"download needs models: cascade-train download c_3b. Models: {', '.join(sorted(targets))}. Networks of "
            f"evaluations: {', '.join(NETWORKS)}."
        )
    for model in words:
        if model not in targets:
            raise ConfigError(f"model={model}: no such option.{did_you_mean(model, [*targets, *NETWORKS])}")
    if not words and not given:
        return []
    if words and (twice := [each for each in given if each.startswith("model=")]):
        raise ConfigError(f"{words[0]} and {twice[0]} both name a model. Leave one out.")
    given += ["run.name=download", "train.global_batch_size=1"]
    given += [] if config_dir is None else [searching(config_dir)]
    runs = [[f"model={model}", *given] for model in words] or [given]
    return [with_defaults({"task": default_task(run, targets)}, run) for run in runs]


def default_task(overrides: list[str], targets: Mapping[str, str]) -> str:
    """Return a task that fits the model that overrides name first; `targets` are the classes of models."""
    model = next((each.partition("=")[2] for each in overrides if each.startswith("model=")), None)
    can = class_constant(targets[model], "abilities") if model is not None and model in targets else None
    fits = class_constant(option_targets("task")["finetune"], "fits")
    return "finetune" if can is None or can & {*fits} else "reconstruction"


COMMAND = Command(arguments=DownloadArgs, run=download, takes_rest=True)
