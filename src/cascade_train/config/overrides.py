"""Overrides that Hydra's grammar refuses, and the quoted form that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cascade_train.config.groups import groups
from cascade_train.errors import ConfigError

BRACKETS = (("[", "]"), ("(", ")"), ("{", "}"))

HYDRAS_OWN = {"hydra.run.dir": "run.dir", "hydra.job.name": "run.name"}
"""Keys of Hydra's that have no effect on a run here -> ours that have."""


def refusal(override: str) -> str:
    """Return one paragraph on an override that Hydra's grammar refuses, with the form that works."""
    key, equals, value = override.partition("=")
    if not equals:
        return (
            f"{override!r} is not an override. Write key=value, with no spaces around =; a value with spaces is quoted "
            """for the shell, e.g. 'sample.prompts=["a red cat"]'."""
        )
    for parts in (override.replace(", ", " ").split(), re.split(r",(?=[\w.@]+=)", override)):
        if len(parts) > 1 and all(_is_one_override(part) for part in parts):
            return f"{override!r} holds {len(parts)} overrides. Separate them by spaces: {shlex.join(parts)}."
    if parses(bare := override.rstrip(",;")):
        return f"{override!r} ends with a separator. Write: {shlex.quote(bare)}"
    form = quoted_form(override)
    if form is not None:
        return (
            f"{override!r} cannot be read: braces, brackets, spaces and symbols inside a value need quotes of their "
            f"own, and the whole needs quotes for the shell. Write: {form}"
        )
    reason = f"{key!r} is not a path of names such as train.max_steps."
    if fault := _unbalanced(value):
        reason = f"a {fault}. Quote the whole override for the shell, e.g. 'key=[a,b]'."
    return f"{override!r} cannot be read: {reason}"


def quoted_form(override: str) -> str | None:
    """Return the override as it works on a command line, quoted for the shell; None where none was found."""
    key, _, value = override.partition("=")
    for candidate in (f"{key}={_quoted(value)}", f"{key}={_quote(value)}"):
        if not _unbalanced(value) and parses(candidate):
            return shlex.quote(candidate)
    return None


def whole_number(key: str, given: str) -> str:
    """Return a sentence on a text that is no whole number, with one that is."""
    digits = re.search(r"\d+", given)
    number = int(digits[0]) if digits else 1000
    with suppress(ValueError, OverflowError):
        number = int(float(given)) or 1
    return f"{key}={given} must be a whole number, e.g. {key}={number}."


def _is_one_override(text: str) -> bool:
    key, equals, _ = text.partition("=")
    return bool(equals) and ("." in key or key.partition("@")[0] in groups()) and parses(text)


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
    """Return whether a text names a file or a folder; false for an invalid path."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


def given_values(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the different values that overrides give to each key, the one that counts last."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals:
            values[key] = [*(each for each in values.get(key, ()) if each != value), value]
    return values


def check_not_expanded(overrides: Sequence[str]) -> None:
    """Refuse what a shell leaves of an unquoted `key=a-{000..005}.tar`: one override per number."""
    for key, given in given_values(overrides).items():
        numbers = [re.findall(r"\d+", value) for value in given]
        changing = [column for column in zip(*numbers, strict=False) if len({*column}) > 1]
        is_path = re.search(r"[A-Za-z]", given[0]) and re.search(r"[\[./]", given[0])
        if len(changing) != 1 or not is_path or len({re.sub(r"\d+", "#", value) for value in given}) > 1:
            continue
        first, last = changing[0][0], changing[0][-1]
        if [int(number) - int(first) for number in changing[0]] == list(range(len(given))):
            pattern = given[0].replace(first, f"{{{first}..{last}}}", 1)
            raise ConfigError(
                f"{key} is given {len(given)} times, for consecutive numbers: the shell has expanded the braces of "
                f"{key}={pattern} before they came here. Write: {quoted_form(f'{key}={pattern}')}"
            )


def searching(config_dir: str | Path) -> str:
    """Return the override by which a composition finds options in a folder of a user's own, as by `--config-dir`."""
    if not Path(config_dir).is_dir():
        raise ConfigError(f"config_dir={config_dir} is not a folder. Give the folder of your own configuration.")
    return f"hydra.searchpath=['file://{Path(config_dir).absolute()}']"


def _quoted(value: str) -> str:
    """Return a value with quotes around every part of its lists and mappings that the grammar refuses."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(map(_quoted, _items(value)))}]"
    if value.startswith("{") and value.endswith("}") and all(":" in item for item in _items(value)):
        pairs = [item.partition(":") for item in _items(value)]
        return "{" + ",".join(f"{name.strip()}:{_quoted(item)}" for name, _, item in pairs) + "}"
    return value if parses(f"key={value}") and parses(f"key=[{value}]") else _quote(value)


def _quote(value: str) -> str:
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value)
    return f'"{escaped}"'


def _items(value: str) -> list[str]:
    """Return the items of a list or mapping as it is written, split at the commas outside brackets and quotes."""
    items: list[str] = []
    for piece in value[1:-1].split(","):
        if items and _unbalanced(items[-1]):
            items[-1] += f",{piece}"
        else:
            items.append(piece)
    return items


def _unbalanced(value: str) -> str:
    """Return which bracket or quote is not closed or opened; empty where all are. An apostrophe counts as none."""
    if value.count('"') % 2:
        return '" is not closed'
    surplus = {pair: value.count(pair[0]) - value.count(pair[1]) for pair in BRACKETS}
    faults = [f"{pair[0]} is not closed" if n > 0 else f"{pair[1]} is not opened" for pair, n in surplus.items() if n]
    return next(iter(faults), "")
