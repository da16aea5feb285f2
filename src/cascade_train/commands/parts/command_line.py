"""What a command of `cascade-train` declares, and how a command line becomes a call of it.

Parses key=value into a dataclass, and words without a key; shows --help; sets up logging and exit codes. Trainings,
which Hydra composes, go through config/launch.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.error_messages import exit_code
from cascade_train.config.groups import commands, did_you_mean, nearest
from cascade_train.config.help import attribute_docs, shown, table
from cascade_train.config.overrides import is_existing_path, whole_number
from cascade_train.config.sweeps.slurm import adopt_slurm_step, one_thread_a_rank
from cascade_train.errors import ConfigError
from cascade_train.redaction import show_log

S = TypeVar("S")

HELP = {"-h", "--help"}

ALIASES = {"from": "source"}
"""Keys that are not Python names: as typed -> field."""

MOST_COMMAS = 20
"""In a path that is given unquoted in a list."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a file of commands/ declares as COMMAND, or, where the command has actions, as a dict of them by name.

    Attributes:
        arguments: dataclass of its keys, with a string below each field; a field without a default must be given.
        run: takes the arguments and, where one is composed, a run's configuration, and returns an exit code.
        usage: its words as they are typed, those to fill in in capitals, behind the name of an action.
        words: keys that words without `=` fill, in their order; the first must be given.
        many_ranks: whether several processes may share the work.
        shows_log: show what the library logs as information; False = warnings alone.
        run_defaults: compose the other arguments as those of a run, with these options of groups where none is chosen.
        check: returns that configuration as it is checked for the arguments; None = as a training checks it.
        takes_rest: pass the other arguments to `run`, as they are typed.
    """

    arguments: type[Any]
    run: Callable[..., int]
    usage: str = ""
    words: tuple[str, ...] = ()
    many_ranks: bool = False
    shows_log: bool = False
    run_defaults: Mapping[str, str] | None = None
    check: Callable[[Any, DictConfig], DictConfig] | None = None
    takes_rest: bool = False


def run_command(argv: Sequence[str]) -> int:
    """Run the command that `argv` begins with and return its exit code, as config/error_messages.py defines them.

    HYDRA_FULL_ERROR in the environment raises errors as they are, as for trainings.
    """

    def run() -> int:
        adopt_slurm_step()
        one_thread_a_rank()
        return _run(*argv)

    return run() if "HYDRA_FULL_ERROR" in os.environ else exit_code(run)


def _run(name: str, *argv: str) -> int:
    if name not in commands():
        raise ConfigError(
            f"{name!r} is not a command.{nearest(name, commands())} Commands: {', '.join(commands())}. A training "
            "is written key=value, e.g. cascade-train task=lora model=c_tiny; --help explains both."
        )
    declared = importlib.import_module(f"cascade_train.commands.{name}").COMMAND
    if isinstance(declared, Command):
        return _call(declared, argv, help_head=f"cascade-train {name} {declared.usage or 'key=value …'}\n\n")
    actions = table({each.usage: _meaning(each.arguments) for each in declared.values()})
    usage = f"cascade-train {name} ACTION …; ACTION --help lists its keys\n\n{actions}\n"
    if not argv or argv[0] in HELP:
        sys.stdout.write(usage)
        return 0
    action, *rest = argv
    if action not in declared:
        near = did_you_mean(action, declared)
        if is_existing_path(action):
            near = f" An action comes first. Write: cascade-train {name} {next(iter(declared))} {action}"
        raise ConfigError(f"{name} {action} is unknown.{near}\n{usage}")
    return _call(declared[action], rest, help_head=f"{usage}\n")


def _call(command: Command, argv: Sequence[str], *, help_head: str) -> int:
    """Run one command, or action of a command, with the arguments after its name."""
    if not HELP.isdisjoint(argv):
        sys.stdout.write(f"{help_head}{help_text(command.arguments)}")
        if command.run_defaults is not None:
            sys.stdout.write("\nAll other arguments are those of a training: cascade-train --help\n")
        return 0
    if command.run_defaults is None and not command.takes_rest:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not command.many_ranks:
            raise ConfigError("this command runs in one process: start it without torchrun, or with one task of srun.")
        show_log(logging.INFO if command.shows_log else logging.WARNING)
        return command.run(parse(command.arguments, _with_keys(command, argv, usage=help_head.rstrip())))
    from cascade_train.config.launch import compose_and_run, leaving_no_results

    names = {_typed(field.name) for field in dataclasses.fields(command.arguments)}
    own = [argument for argument in argv if argument.partition("=")[0] in names]
    arguments = parse(command.arguments, own)
    rest = [argument for argument in argv if argument not in own]
    if command.run_defaults is None:
        show_log(logging.WARNING)
        return command.run(arguments, rest)
    check = None if command.check is None else partial(command.check, arguments)
    with leaving_no_results(with_defaults(command.run_defaults, rest)) as argv:
        return compose_and_run(argv, partial(command.run, arguments), remedy="", check=check)


def with_defaults(defaults: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """Return `argv` with the options of `defaults` for groups that neither it nor an experiment chooses."""
    given = {argument.partition("=")[0].lstrip("+") for argument in argv}
    chosen = {} if "experiment" in given else defaults
    return [*(f"{group}={option}" for group, option in chosen.items() if group not in given), *argv]


def _with_keys(command: Command, argv: Sequence[str], *, usage: str) -> list[str]:
    """Return arguments in which each word without a key has the key that it fills."""
    if not command.words:
        return list(argv)
    keys = [(argument, argument.partition("=")[0]) for argument in argv]
    words = [each for each, key in keys if key == each or "/" in key or is_existing_path(each)]
    free = [key for key in command.words if not any(argument.startswith(f"{key}=") for argument in argv)]
    if not words and command.words[0] in free:
        first = next(word for word in command.usage.split() if word.isupper())
        action = command.usage.partition(first)[0].strip() or "The command"
        typed = [each for each, key in keys if key == first.lower()]
        given = f", without a key: {typed[0].partition('=')[2]}" if typed else ""
        raise ConfigError(f"{action} needs a {first.lower()}{given}.\n{usage}")
    if len(words) > len(free):
        raise ConfigError(f"{words[len(free)]!r} is one word too many.\n{usage}")
    keyed = [f"{key}={word}" for key, word in zip(free, words, strict=False)]
    return [*keyed, *(argument for argument in argv if argument not in words)]


def parse(schema: type[S], argv: Sequence[str]) -> S:
    """Return an instance of a dataclass filled from `key=value` arguments.

    A field without a default, or with MISSING, must be given; `from=` fills the field `source`.
    """
    pairs = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals or key.startswith("-"):
            is_source = "source" in getattr(schema, "__dataclass_fields__", ()) and is_existing_path(argument)
            form = f"from={argument}" if is_source else "key=value"
            raise ConfigError(f"{argument!r} is not an argument. Write {form}; --help lists the keys.")
        if value == "None":
            raise ConfigError(f"{argument} is the text None. Where a key takes none, write {key}=null")
        pairs.append((key, value))
    return filled(schema, pairs, _value)


def filled(schema: type[S], values: Iterable[tuple[str, Any]], read: Callable[[Any], Any] = lambda each: each) -> S:
    """Return an instance of a dataclass filled from values by key, as `read` returns them; otherwise as `parse`."""
    cfg = OmegaConf.structured(schema)
    for key, value in values:
        _set(cfg, key, value, read)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        meaning = attribute_docs(schema).get(missing[0].partition(".")[0], "").rstrip(".")
        raise ConfigError(f"{_typed(missing[0])} is not set: {meaning}. Set it: {_typed(missing[0])}=<value>.")
    return cast(S, OmegaConf.to_object(cfg))


def listed(given: Any) -> list[str]:
    """Return what an argument names: nothing, one text, or a list of them."""
    return [] if given is None else [str(each) for each in given] if isinstance(given, list) else [str(given)]


def help_text(schema: type) -> str:
    """Return the fields of a command's dataclass with defaults and meanings, one per line."""
    docs = attribute_docs(schema)
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(schema), enum_to_str=True)
    fields = [f"  {_typed(name)}={shown(value)}  {docs.get(name, '')}" for name, value in defaults.items()]
    return "\n".join([_meaning(schema), "", "Arguments, as key=value:", *fields, ""])


def _meaning(schema: type) -> str:
    return " ".join((schema.__doc__ or "").split())


def _set(cfg: DictConfig, key: str, value: Any, read: Callable[[Any], Any]) -> None:
    field = ALIASES.get(key, key)
    known = list(cfg.keys())  # `in cfg` is false for a missing value
    if field.partition(".")[0] not in known or key in ALIASES.values():
        raise ConfigError(f"{key} is unknown.{did_you_mean(key, [_typed(str(other)) for other in known])}")
    try:
        OmegaConf.update(cfg, field, read(value))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        quoted = shlex.quote(f'{key}="{text}"')
        reason = str(error).splitlines()[0].rstrip(".:")
        if reason.endswith("could not be converted to Integer"):
            raise ConfigError(whole_number(key, str(value))) from error
        if reason.endswith("could not be converted to Float"):
            raise ConfigError(f"{key}={value} must be a number.") from error
        given = repr(f"{key}={value}")
        raise ConfigError(f"{given} cannot be read: {reason}. A text with symbols is written {quoted}.") from error


def _value(text: str) -> Any:
    """Return what YAML reads; an existing path that is no number is taken as it is written, and so is `@file`."""
    if text.startswith("@"):
        return text
    try:
        value = OmegaConf.from_dotlist([f"value={text}"]).value
    except (OmegaConfBaseException, yaml.YAMLError):
        if is_existing_path(text):
            return text
        raise
    if isinstance(value, list | ListConfig) and all(isinstance(item, str) for item in value):
        return _rejoined(list(value))
    return text if isinstance(value, str) and is_existing_path(text) else value


def _rejoined(items: list[str]) -> list[str]:
    """Return a list in which an existing path that was split at its commas is one item again."""
    whole = []
    while items:
        ends = range(min(len(items), MOST_COMMAS + 1), 1, -1)
        end = next((end for end in ends if is_existing_path(",".join(items[:end]))), 1)
        whole.append(",".join(items[:end]))
        items = items[end:]
    return whole


def _typed(field: str) -> str:
    """Return a field as it is typed on the command line."""
    return next((alias for alias, name in ALIASES.items() if name == field), field)
