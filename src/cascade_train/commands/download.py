"""Download what models need from the hub, and check it.

    cascade-train download c_3b b_3b

Nothing is loaded; what comes here, and how, is decided in assembly/loaded_weights.py and files/hub.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cascade_train.commands.parts.command_line import Command, with_defaults
from cascade_train.config.groups import did_you_mean, group_options
from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, free_bytes, unavailable

MIB = 2**20


@dataclass(kw_only=True)
class DownloadArgs:
    """Download what models need from the hub at the revisions that they name; other arguments are those of a run.

    Models are words (c_3b b_3b); keys of a training (task=lora model=c_3b) name what that training needs.
    """

    dry_run: bool = False
    """Only show what would be downloaded, what is there already, and the room that is left."""


@dataclass(frozen=True)
class _Item:
    """A file to have: where it is on the hub, its size in bytes, whether it is in the cache, and the key it is for."""

    source: HubSource
    name: str
    size: int
    is_here: bool
    origin: str


def download(args: DownloadArgs, rest: list[str]) -> int:
    """Print what is needed, download what is missing, check all of it against the hub's hashes, and return 0.

    Raises:
        ConfigError: no such model, or something that cannot be had, with the remedy.
    """
    items = _items(rest)
    for item in items:
        where = f"{item.source.repo}@{(item.source.commit or item.source.asked)[:12]}:{item.name}"
        sys.stdout.write(f"{item.size / MIB:10,.1f} MiB  {'here    ' if item.is_here else 'to fetch'}  {where}\n")
    missing = sum(item.size for item in items if not item.is_here)
    folder, free = free_bytes()
    sys.stdout.write(f"To fetch: {missing / MIB:,.1f} MiB. Free for {folder}: {free / MIB:,.1f} MiB.\n")
    sys.stdout.flush()
    if missing > free:
        raise ConfigError(
            f"{missing / MIB:,.1f} MiB do not fit into {folder}, which has {free / MIB:,.1f} MiB. Free space, or set "
            "HF_HOME to a folder on another disk."
        )
    if args.dry_run:
        return 0
    for item in items:
        try:
            item.source.fetch(item.name, verify=True)
        except ConfigError:
            raise
        except Exception as error:  # of the client or the network
            raise unavailable(item.origin, error) from error
    sys.stdout.write(f"{len(items)} files are here and match their hashes; HF_HUB_OFFLINE=1 works from now on.\n")
    return 0


def _items(rest: list[str]) -> list[_Item]:
    """Return each file once, in the order in which models load them."""
    from cascade_train.assembly.components import build_parts  # heavy: torch and everything above it
    from cascade_train.assembly.loaded_weights import weight_specs
    from cascade_train.config.saved import composed
    from cascade_train.models.formats.weights_source import hub_names, local_path

    items: dict[tuple[str, str, str], _Item] = {}
    for overrides in runs_of(rest):
        cfg = composed(overrides)
        for spec in weight_specs(cfg, build_parts(cfg)):
            if local_path(spec.source).exists():
                continue
            source, names = hub_names(spec)
            for name in names:
                origin = f"{spec.key}={spec.source}"
                try:
                    info = source.look(name)
                except Exception as error:  # of the client or the network
                    raise unavailable(origin, error) from error
                if info is None:
                    raise ConfigError(f"{origin}: {source.repo} has no {name} at {source.asked}; name another file")
                item = _Item(source, name, info.file_size or 0, is_here=info.is_cached, origin=origin)
                items.setdefault((source.repo, source.asked, name), item)
    return list(items.values())


def runs_of(rest: list[str]) -> list[list[str]]:
    """Return the overrides of the training of each model that is named, or of the one that the arguments are."""
    words = [argument for argument in rest if "=" not in argument]
    given = [argument for argument in rest if "=" in argument]
    known = group_options("model")
    if not rest:
        raise ConfigError(f"download needs models: cascade-train download c_3b. Models: {', '.join(known)}.")
    for model in words:
        if model not in known:
            raise ConfigError(f"model={model}: no such option.{did_you_mean(model, known)}")
    if words and (twice := [each for each in given if each.startswith("model=")]):
        raise ConfigError(f"{words[0]} and {twice[0]} both name a model. Leave one out.")
    own = ["run.name=download", "train.global_batch_size=1", *given]
    runs = [[f"model={model}", *own] for model in words] or [own]
    return [with_defaults({"task": "finetune" if is_stage_c(run) else "reconstruction"}, run) for run in runs]


def is_stage_c(overrides: list[str]) -> bool:
    """Return whether the model that overrides name first is one of Stage C; True where they name none."""
    return next((each.startswith("model=c_") for each in overrides if each.startswith("model=")), True)


COMMAND = Command(arguments=DownloadArgs, run=download, takes_rest=True)
