"""Overrides that Hydra's grammar refuses, and the quoted form that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cascade_train.errors import ConfigError

OPENING, CLOSING = "[({", "])}"

HYDRAS_OWN = {"hydra.run.dir": "run.dir", "hydra.job.name": "run.name"}
"""Keys of Hydra's that have no effect on a run here -> ours that have."""


def refusal(override: str) -> str:
    """Return one paragraph on an override that Hydra's grammar refuses, with the form that works."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is not an override. Write key=value, with quotes for the shell around spaces."
    parts = [part.rstrip(",") for part in override.split()]
    if len(parts) > 1 and all("=" in part and parses(part) for part in parts):
        return f"{override!r} holds {len(parts)} overrides. Give each by itself: {', '.join(map(repr, parts))}."
    form = quoted_form(override)
    if form is None:
        reason = _imbalance(value) or f"{key!r} is not a path of names such as train.max_steps."
        return f"{override!r} cannot be read: {reason}"
    return (
        f"{override!r} cannot be read: braces, brackets, spaces and symbols inside a value need quotes of their own, "
        f"and the whole needs quotes for the shell. Write: {form}"
    )


def quoted_form(override: str) -> str | None:
    """Return the override as it works on a command line, quoted for the shell; None where none was found."""
    key, _, value = override.partition("=")
    for candidate in (f"{key}={_quoted(value)}", f"{key}={_quote(value)}"):
        if not _imbalance(value) and parses(candidate):
            return shlex.quote(candidate)
    return None


def parses(override: str) -> bool:
    """Return whether Hydra's grammar reads an override, as a single value rather than a sweep."""
    try:
        return not OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException:
        return False


def with_paths_quoted(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a value that is an existing path is quoted, where Hydra's grammar would refuse it.

    Runs of a sweep lie in folders such as `lr=0.0001,rank=4`, which the grammar does not read as a text.
    """

    def quoted(argument: str) -> str:
        key, _, value = argument.partition("=")
        is_good = argument.startswith("-") or not is_existing_path(value) or parses(argument)
        return argument if is_good else f"{key}={_quote(value)}"

    return [quoted(argument) for argument in arguments]


def is_existing_path(text: str) -> bool:
    """Return whether a text names a file or a folder; false for what no file system takes as a name."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


def check_not_expanded(overrides: Sequence[str]) -> None:
    """Refuse what a shell leaves of an unquoted `key=a-{000..005}.tar`: one override per number."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and not key.startswith("-"):
            values.setdefault(key, []).append(value)
    for key, given in values.items():
        numbers = [re.findall(r"\d+", value) for value in given]
        for place in range(min(map(len, numbers))):
            column = [row[place] for row in numbers]
            if len(given) > 1 and [int(n) - int(column[0]) for n in column] == list(range(len(given))):
                _refuse_expanded(key, given, column)


def searching(config_dir: str | Path) -> str:
    """Return the override by which a composition finds options in a folder of a user's own, as by `--config-dir`."""
    return f"hydra.searchpath=['file://{Path(config_dir).absolute()}']"


def check_not_hydras(overrides: Sequence[str]) -> None:
    """Refuse keys of Hydra's own that other programs are steered by and that have no effect on a run here."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in HYDRAS_OWN:
            raise ConfigError(f"{override} has no effect on a run. Write: {shlex.quote(f'{HYDRAS_OWN[key]}={value}')}")


def _refuse_expanded(key: str, given: Sequence[str], column: Sequence[str]) -> None:
    pattern = given[0].replace(column[0], f"{{{column[0]}..{column[-1]}}}", 1)
    rest = {value.replace(number, "", 1) for value, number in zip(given, column, strict=True)}
    if len(rest) > 1 or not re.search(r"[A-Za-z]", given[0]) or not re.search(r"[\[./]", given[0]):
        return
    raise ConfigError(
        f"{key} is given {len(given)} times, for consecutive numbers: the shell has expanded the braces of "
        f"{key}={pattern} before they came here. Write: {quoted_form(f'{key}={pattern}')}"
    )


def _quoted(value: str) -> str:
    """Return a value with quotes around every part of its lists and mappings that the grammar refuses."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(_quoted(item) for item in _split(value[1:-1], ','))}]"
    if value.startswith("{") and value.endswith("}") and all(":" in item for item in _split(value[1:-1], ",")):
        pairs = [item.partition(":") for item in _split(value[1:-1], ",")]
        return "{" + ",".join(f"{name.strip()}:{_quoted(item)}" for name, _, item in pairs) + "}"
    return value if parses(f"key={value}") and parses(f"key=[{value}]") else _quote(value)


def _quote(value: str) -> str:
    escaped = re.sub(r'(\\*)(")', r"\1\1\\\2", value)
    tail = re.search(r"\\*$", escaped)
    return f'"{escaped}{tail[0] if tail else ""}"'


def _split(text: str, separator: str) -> list[str]:
    """Split at separators that stand outside brackets and quotes."""
    items, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == separator and depth == 0:
            items.append(text[start:position])
            start = position + 1
    return [*items, text[start:]] if text.strip() else []


def _imbalance(value: str) -> str:
    """Return a sentence on the first bracket or quote that has no partner; empty where all have one."""
    stack: list[str] = []
    quote = ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and (not stack or character == '"'):
            quote = character
        elif character in OPENING:
            stack.append(character)
        elif character in CLOSING and (not stack or OPENING.index(stack.pop()) != CLOSING.index(character)):
            return f"{character!r} closes a bracket that was not opened."
    if stack:
        return f"{stack[-1]!r} is not closed. Quote the whole override for the shell, e.g. 'key=[a,b]'."
    return f"the quote {quote} is not closed." if quote else ""
