"""From the command line to a checked configuration: runs Hydra on `conf/`, and passes the result on."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import hydra
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from cascade_train.config.error_messages import code_of, noted, other_name
from cascade_train.config.groups import NESTED, commands, conf_dir, groups
from cascade_train.config.overrides import HYDRAS_OWN, check_not_expanded, given_values, with_paths_quoted
from cascade_train.config.schema import Root
from cascade_train.config.sweep import MULTIRUN, check_launcher, is_main, save_redacted
from cascade_train.config.sweeps.runs import place_run
from cascade_train.config.sweeps.slurm import adopt_slurm_step, one_thread_a_rank, slurm_jobs_followed
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import walk_data
from cascade_train.redaction import redact_argument, show_log
from cascade_train.signals import CONTINUED, Signals, while_importing

ConfigStore.instance().store(name="schema", node=Root)


def compose_and_run(
    argv: Sequence[str],
    train: Callable[[DictConfig], int],
    *,
    remedy: str = CONTINUED,
    check: Callable[[DictConfig], DictConfig] | None = None,
) -> int:
    """Run one command line and return the exit code.

    `train` is called with each composed and checked configuration and returns an exit code: 0 done, 1 runtime failure,
    2 invalid configuration, 75 stopped and saved, 130 interrupted (docs/stopping.md). `remedy` follows the message that
    it was interrupted. `check` checks in the place of preflight.
    """
    raw = "HYDRA_FULL_ERROR" in os.environ
    try:
        prepare_process()
    except ConfigError as error:
        return code_of(error)
    argv = with_implied_choices(with_paths_quoted(argv))

    def job(cfg: DictConfig) -> int:
        if not HELP.isdisjoint(argv):
            from cascade_train.config.help import help_text

            sys.stdout.write(help_text(cfg))
            return 0
        hydra_cfg = HydraConfig.get()
        try:
            place_run(cfg, hydra_cfg, argv)
            with while_importing():  # not before, since what only shows a configuration needs none of it
                from cascade_train.config.preflight import preflight

                ready = preflight(cfg) if check is None else check(cfg)
            show_log(logging.INFO if is_main() else logging.WARNING)
            with _full_errors("1" if raw else None):
                code = noted(train(ready))
        except (Exception, KeyboardInterrupt) as error:
            if raw:
                raise
            code = code_of(error, remedy=remedy)
        if code and not (hydra_cfg.mode == RunMode.MULTIRUN and hydra_cfg.callbacks):  # sweep.SweepResults reads codes
            raise SystemExit(code)
        return code

    try:
        check_launcher(argv)
        followed, arguments = slurm_jobs_followed(argv), _arguments([a for a in argv if a not in HELP])
        with (
            Signals(),
            arguments,
            texts_checked(),
            replaced(OmegaConf, "save", save_redacted),
            followed,
            replaced(HydraConfig.instance(), "cfg", HydraConfig.instance().cfg),
            _full_errors("1"),  # else Hydra prints what fails, on every rank
        ):
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if raw:
            raise
        return code_of(error, remedy=remedy)


@contextmanager
def leaving_no_results(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield a command line whose sweep leaves no folder, for commands that train nothing; others as they are."""
    with TemporaryDirectory() as folder:
        more = [f"hydra.sweep.dir={folder}", "~hydra.callbacks.sweep"] if MULTIRUN & set(argv) else []
        yield [*argv, *more]


def prepare_process() -> None:
    """Set what torch and its launchers read from the environment, before it is imported."""
    adopt_slurm_step()
    one_thread_a_rank()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else C++ stack traces precede the message of a rank


def compose_root(overrides: Sequence[str], *, for_run: bool = True) -> DictConfig:
    """Return the configuration that overrides describe, not checked; `for_run` lets `${hydra:…}` refer to it."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("config", [*overrides], return_hydra_config=for_run)
    if for_run:
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
    return cfg


def with_implied_choices(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the group choices that it implies, each in the form that Hydra takes.

    `data.urls=` or `data.path=` alone chooses the data that reads it; `+experiment=x` is `experiment=x`;
    groups of a component, such as `filter=`, are chosen there; `--help` alone shows the smallest model and task.
    """
    known = groups()
    argv = [_in_full(argument, known) for argument in argv]
    given = {key.lstrip("+"): value for key, equals, value in (argument.partition("=") for argument in argv) if equals}
    implied = []
    if not given.keys() & {"data", "experiment"}:
        for key in [key for key in ("data.urls", "data.path") if key in given][:1]:
            choice = "webdataset" if key == "data.urls" else data_of_path(given[key])
            implied.append(f"data={choice}")
            if choice == "webdataset":
                argv = [argument.replace("data.path=", "data.urls=", 1) for argument in argv]
            if is_main():
                sys.stderr.write(f"{key} is given and no data= is chosen: data={choice}.\n")
    if not HELP.isdisjoint(argv):
        implied += [f"{group}={option}" for group, option in EXAMPLE.items() if group not in given]
    return [*implied, *argv]


def _in_full(argument: str, known: Sequence[str]) -> str:
    """Return an override that chooses an option of a known group with the key that Hydra has; others as they are.

    What Hydra takes for a number is quoted, so that it is refused as other names are that no option has.
    """
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    if not equals or name.partition("@")[0] not in known:
        return argument
    text = ",".join(f'"{each}"' if NO_NAME.fullmatch(each) else each for each in value.split(","))
    return f"{NESTED.get(name, name) if name in known else key}={text}"


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys of Hydra's without effect here, what a shell has expanded, and two options of one group.

    Of two options Hydra would take the last; which of several values of a key counts is logged.
    """
    check_not_expanded(overrides)
    for key, values in given_values(overrides).items():
        if key in HYDRAS_OWN:
            form = shlex.quote(f"{HYDRAS_OWN[key]}={values[-1]}")
            raise ConfigError(f"{key}={values[-1]} has no effect on a run. Write: {form}")
        if values[-1] == "None" and key.partition("@")[0] not in groups():
            raise ConfigError(f"{key}=None is the text None. Where a key takes none, write {key}=null")
        if len(values) == 1:
            continue
        if "/" in key or key.partition("@")[0] in groups():
            raise ConfigError(
                f"{key} is chosen more than once: {' and '.join(f'{key}={each}' for each in values)}, of which Hydra "
                "takes the last. Keep one; a script with a default that its caller may replace takes that from a "
                "variable (docs/config.md, Overrides)."
            )
        if is_main():
            last = redact_argument(f"{key}={values[-1]}").partition("=")[2]
            sys.stderr.write(f"{key} is given {len(values)} times; the last counts: {last}.\n")


def data_of_path(value: str) -> str:
    """Option of data that reads a path, or the first of a list of paths, as typed for `data.path`.

    In a folder pictures decide, then tars, then tables, in the first folder below it that has any of them. A parquet
    file beside a tar or folder of its name is what img2dataset says of that, and no table of pictures.
    """
    first = value.strip("[] ").partition(",")[0].strip("\"' ")
    if first.startswith(("s3://", "pipe:")):
        return "webdataset"
    path = Path(first).expanduser()
    for folder, names in walk_data(path) if path.is_dir() else [(path.parent, [path.name])]:
        kinds = {Path(name).suffix.lower() for name in names}
        has_pictures, tars = bool(kinds & PICTURES), [name for name in names if name.lower().endswith(TAR_ENDS)]
        described = {name.partition(".")[0] for name in tars}
        tables = [Path(name).stem for name in names if name.lower().endswith(".parquet")]
        is_table = any(stem not in described and not (folder / stem).is_dir() for stem in tables)
        if is_table and (has_pictures or not tars):
            return "parquet"
        if has_pictures or tars:
            return "folder" if has_pictures else "webdataset"
        if kinds & TABLES and not path.is_dir():
            return "csv"
    return "folder"


HELP = {"--help", "-h"}

NO_NAME = re.compile(r"[-+]?[\d_.]+|null|true|false", re.IGNORECASE)
"""Values that Hydra's grammar does not read as a text, as the name of an option must be."""

TABLES = {".csv", ".tsv", ".jsonl", ".ndjson"}
PICTURES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp"}
TAR_ENDS = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

EXAMPLE = {"model": "c_tiny", "task": "finetune"}
"""What `--help` shows where nothing is chosen; the choices that stand in every run's name."""


def _arguments(argv: Sequence[str]) -> AbstractContextManager[None]:
    """Let Hydra read `argv` from sys within the block; refuse a flag that it does not know, and a command."""
    overrides = parser().parse_intermixed_args(argv).overrides
    if command := next((word for word in overrides if word.isidentifier() and word in commands()), None):
        raise ConfigError(
            f"{command!r} is a command and comes first: cascade-train {command} …; --help lists its keys."
        )
    check_overrides(overrides)
    flags = [argument for argument in argv if argument not in overrides]
    return replaced(sys, "argv", [sys.argv[0], *overrides, *flags])  # Hydra refuses flags between overrides


def parser() -> argparse.ArgumentParser:
    """Return Hydra's parser of flags and overrides, which refuses with a ConfigError."""

    def refuse(message: str) -> NoReturn:
        names = re.findall(r"(?<=\s)--?([\w-]+)", message)
        known = "".join(dict.fromkeys(other_name(name) for name in names))
        raise ConfigError(f"{message}. Overrides are key=value, without dashes; --help explains the keys.{known}")

    found = get_args_parser()
    found.error = refuse  # type: ignore[method-assign]
    return found


@contextmanager
def _full_errors(value: str | None) -> Iterator[None]:
    """Set the variable by which Hydra lets exceptions pass, or remove it: processes of a run would inherit it."""
    before = os.environ.pop("HYDRA_FULL_ERROR", None)
    os.environ |= {} if value is None else {"HYDRA_FULL_ERROR": value}
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        os.environ |= {} if before is None else {"HYDRA_FULL_ERROR": before}


_load_any: Any = ConfigRepository.load_config


def _load_checked(repository: ConfigRepository, config_path: str) -> Any:
    """Load a file of a configuration; name one that is not UTF-8, and read the header behind a byte order mark, too."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or source.scheme() != "file":
        return _load_any(repository, config_path)
    file = Path(source.path, source._normalize_file_name(config_path))
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, line = error.start, content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file} is not UTF-8: byte 0x{content[at]:02x} at {at}, line {line}. Save it as UTF-8."
        ) from error
    loaded = _load_any(repository, config_path)
    loaded.header = source._get_header_dict(text)
    return loaded


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def texts_checked() -> AbstractContextManager[None]:
    """Let Hydra name a file that is not UTF-8, and read the header behind a byte order mark, within this block."""
    return replaced(ConfigRepository, "load_config", _load_checked)
