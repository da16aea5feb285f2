"""The command line of the small verbs: `key=value` over one dataclass, without Hydra."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.groups import did_you_mean
from cascade_train.config.paths import is_existing_path
from cascade_train.config.static.signatures import attribute_docs
from cascade_train.errors import ConfigError

S = TypeVar("S")

ALIASES = {"from": "source"}
"""Keys that are not Python names: as typed -> field."""

MOST_COMMAS = 20
"""In a path that is given unquoted in a list."""


def parse_verb(schema: type[S], argv: Sequence[str]) -> S:
    """Return an instance of a dataclass filled from `key=value` arguments; `--help` prints its fields and exits.

    Args:
        schema: dataclass with a string below each field; a field without default, or MISSING, must be given.
        argv: arguments, without the program's name; `from=` fills the field `source`.

    Raises:
        ConfigError: an unknown key, a wrong value, or a missing one.
        SystemExit: with 0 after `--help`.
    """
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(schema))
        raise SystemExit(0)
    cfg = OmegaConf.structured(schema)
    for argument in argv:
        _set(cfg, argument)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        meaning = attribute_docs(schema).get(missing[0].partition(".")[0], "").rstrip(".")
        raise ConfigError(f"{_typed(missing[0])} is not set: {meaning}. Set it: {_typed(missing[0])}=<value>.")
    filled = OmegaConf.to_object(cfg)
    assert isinstance(filled, schema)
    return filled


def help_text(schema: type) -> str:
    """Return the fields of a verb's dataclass with defaults and meanings, one per line."""
    docs = attribute_docs(schema)
    title = " ".join((schema.__doc__ or "").split())
    fields = [f"  {_typed(f.name)}={_default(f)}  {docs.get(f.name, '')}" for f in dataclasses.fields(schema)]
    return "\n".join([title, "", "Arguments, as key=value:", *fields, ""])


def names_place(argument: str) -> bool:
    """Return whether an argument is a path or another word, rather than key=value; paths may hold `=` too."""
    key, equals, _ = argument.partition("=")
    return not equals or "/" in key or is_existing_path(argument)


def _set(cfg: DictConfig, argument: str) -> None:
    key, equals, value = argument.partition("=")
    field = ALIASES.get(key, key)
    if not equals or key.startswith("-"):
        raise ConfigError(f"{argument!r} is not an argument. Write key=value; --help lists the keys.")
    known = list(cfg.keys())  # `in cfg` is false for a missing value
    if field.partition(".")[0] not in known or key in ALIASES.values():
        raise ConfigError(f"{key} is unknown.{did_you_mean(key, [_typed(str(other)) for other in known])}")
    try:
        OmegaConf.update(cfg, field, _value(value))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        quoted = shlex.quote(f'{key}="{value}"')
        reason = str(error).splitlines()[0].rstrip(".:")
        raise ConfigError(f"{argument!r} cannot be read: {reason}. A text with symbols is written {quoted}.") from error


def _value(text: str) -> Any:
    """Return what YAML reads; an existing path that is no number is taken as it is written."""
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
    whole, first = [], 0
    while first < len(items):
        ends = range(min(len(items), first + MOST_COMMAS + 1), first + 1, -1)
        end = next((end for end in ends if is_existing_path(",".join(items[first:end]))), first + 1)
        whole.append(",".join(items[first:end]))
        first = end
    return whole


def _typed(field: str) -> str:
    """Return a field as it is typed on the command line."""
    return next((alias for alias, name in ALIASES.items() if name == field), field)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    if field.default in (dataclasses.MISSING, MISSING):
        return "???"
    return "null" if field.default is None else str(field.default)
