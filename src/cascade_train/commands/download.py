"""Download what models and evaluations need, and check it.

cascade-train download c_3b b_3b inception clip
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download

from cascade_train.commands.parts.command_line import Command, with_defaults
from cascade_train.config.groups import did_you_mean, option_targets
from cascade_train.config.launch import parser
from cascade_train.config.overrides import searching
from cascade_train.config.saved import composed
from cascade_train.config.targets import class_constant
from cascade_train.errors import ConfigError
from cascade_train.files.hub import free_bytes, unavailable
from cascade_train.models.formats.weights_source import WeightsSpec, hub_names, local_path
from cascade_train.results.evaluation.published import NETWORKS, WebFile

MIB = 2**20


@dataclass(kw_only=True)
class DownloadArgs:
    """Download what models need from the hub at the revisions that they name, and the networks of evaluations.

    Models and networks are words (c_3b b_3b inception clip vgg16); keys of a training (task=lora model=c_3b, or
    experiment=finetune_c_3b) name what that training needs, and --config-dir a folder with options of your own.
    """

    dry_run: bool = False
    """Only show what would be downloaded, what is there already, and the room that is left."""


def download(args: DownloadArgs, rest: list[str]) -> int:
    """Print what is needed, download what is missing, compare it with the hub's hashes, and return 0."""
    networks = [NETWORKS[word] for word in rest if word in NETWORKS]
    specs = [*_needed(rest), *(spec for _, spec in networks if isinstance(spec, WeightsSpec))]
    web = [file for _, file in networks if isinstance(file, WebFile)]
    sources, missing = {spec: hub_names(spec) for spec in specs}, 0
    for spec, (source, names) in sources.items():
        for name in names:
            with _named(spec):
                info = source.look(name)
            if info is None:
                raise ConfigError(f"{spec.key}={spec.source}: {source.repo} has no {name}; name another file")
            missing += 0 if info.is_cached else info.file_size or 0
            _show(f"{source.repo}@{source.asked[:12]}:{name}", info.file_size or 0, is_here=info.is_cached)
    for file in web:
        _show(file.url, file.size, is_here=file.path.is_file())
    free = free_bytes(constants.HF_HUB_CACHE)
    sys.stdout.write(f"To fetch from the hub: {missing / MIB:,.1f} MiB. Free: {free / MIB:,.1f} MiB.\n")
    if missing > free:
        raise ConfigError(f"{constants.HF_HUB_CACHE} has no room for that. Free space, or set HF_HOME to another disk.")
    if args.dry_run:
        return 0
    compared = sum(_fetch(spec) for spec in sources)
    for file in web:
        with _named(file):
            compared += file.fetch().is_file()
    sys.stdout.write(f"{compared} files match their hashes. HF_HUB_OFFLINE=1 works from now on.\n")
    for key, network in networks:
        path = network.path if isinstance(network, WebFile) else _folder(network)
        sys.stdout.write(f"evaluate takes {key}={path}\n")
    return 0


def _show(where: str, size: int, *, is_here: bool) -> None:
    sys.stdout.write(f"{size / MIB:10,.1f} MiB  {'here    ' if is_here else 'to fetch'}  {where}\n")
    sys.stdout.flush()


def _fetch(spec: WeightsSpec) -> int:
    """Download the files of a spec and compare them, those that differ twice; returns how many were compared."""
    source, names = hub_names(spec)
    with _named(spec):
        paths = [source.fetch(name) for name in names]
        if constants.HF_HUB_OFFLINE:
            return 0
        commit = source.commit or source.asked
        wrong = _mismatches(source.repo, commit, names)
        for name in wrong:
            hf_hub_download(source.repo, name, revision=commit, force_download=True)
        if wrong and (still := _mismatches(source.repo, commit, names)):
            raise ConfigError(
                f"{spec.key}={spec.source}: checksum mismatch of {still[0]} in {paths[0].parent}; look for a proxy or "
                "mirror (HF_ENDPOINT) that changes files"
            )
    return len(paths)


def _mismatches(repo: str, commit: str, names: list[str]) -> list[str]:
    found = HfApi().verify_repo_checksums(repo, revision=commit).mismatches
    return [mismatch["path"] for mismatch in found if mismatch["path"] in names]


def _folder(spec: WeightsSpec) -> Path:
    source, names = hub_names(spec)
    return source.fetch(names[0]).parent


@contextmanager
def _named(needed: WeightsSpec | WebFile) -> Iterator[None]:
    """Raise failures of the client and the network as ConfigErrors that name the key."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        origin = f"download={needed.url}" if isinstance(needed, WebFile) else f"{needed.key}={needed.source}"
        raise unavailable(origin, error) from error


def _needed(rest: list[str]) -> list[WeightsSpec]:
    """What the trainings that are named load from the hub, in their order."""
    from cascade_train.assembly import components, model  # heavy: torch and everything above it

    arguments = parser().parse_intermixed_args(rest)
    folder = None if arguments.config_dir is None else Path(arguments.config_dir).absolute()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir {arguments.config_dir}: no such folder.")
    found: list[WeightsSpec] = []
    for overrides in runs_of(arguments.overrides, folder):
        cfg = composed(overrides, may_miss=True)
        found += model.weight_specs(cfg, components.build_parts(cfg))
    return list(dict.fromkeys(spec for spec in found if not local_path(spec.source).exists()))


def runs_of(rest: list[str], config_dir: Path | None = None) -> list[list[str]]:
    """Overrides of the training of each model that is named, or of the one that the arguments are."""
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
    if words and (twice := [argument for argument in given if argument.startswith("model=")]):
        raise ConfigError(f"{words[0]} and {twice[0]} both name a model. Leave one out.")
    given += ["run.name=download", "train.global_batch_size=1"]
    given += [] if config_dir is None else [searching(config_dir)]
    runs = [[f"model={model}", *given] for model in words] or [given]
    return [with_defaults({"task": _default_task(run, targets)}, run) for run in runs]


def _default_task(overrides: list[str], targets: Mapping[str, str]) -> str:
    """A task that fits the model that overrides name first; `targets` are the classes of models."""
    model = next((value.partition("=")[2] for value in overrides if value.startswith("model=")), None)
    can = class_constant(targets[model], "abilities") if model is not None and model in targets else None
    fits = class_constant(option_targets("task")["finetune"], "fits")
    return "finetune" if can is None or can & {*fits} else "reconstruction"


COMMAND = Command(arguments=DownloadArgs, run=download, takes_rest=True)
