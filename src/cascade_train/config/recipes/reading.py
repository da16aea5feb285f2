"""Files of other trainers as plain values: YAML, JSON, TOML, lines of `export KEY=value`, and flags as they are typed.

No expression is run: an interpolation is followed where it leads to a value of the same file, and nowhere else.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from cascade_train.config.saved import load_yaml
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json

MAX_BYTES = 1_000_000
REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
MAX_REFERENCES, LONGEST = 20, 10_000
"""How many interpolations are followed, one behind the other or within one text, and how long what they make may be."""
ENVIRONMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)")
"""A line of a file that a shell reads."""


def read_source(path: Path) -> Any:
    """Return the nested values of a file, by its ending; interpolations of YAML are resolved where they can be.

    Raises:
        ConfigError: it is not there, too large, not of its form, or holds no keys and values.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} is no file of at most {MAX_BYTES} bytes. Name a training configuration.")
    if path.suffix not in READERS:
        source = OmegaConf.to_container(load_yaml(path), resolve=False)
        source = resolved(source) if isinstance(source, dict) else source
    else:
        form, reader = READERS[path.suffix]
        try:
            source = reader(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as {form}: {error}. Give another file, or mend it.") from error
    if isinstance(source, dict) or (isinstance(source, list) and source and all(isinstance(s, dict) for s in source)):
        return source
    raise ConfigError(f"{path} holds no keys and values. Name a training configuration.")


def resolved(source: dict[Any, Any]) -> dict[str, Any]:
    """Return plain values, `???` where an interpolation leads to nothing, too far, or to more than one value.

    No resolver is run. Each reference is followed once, and the size of its value is bounded.
    """
    found: dict[str, Any] = {}

    def referred(key: str, depth: int) -> Any:
        if key not in found:
            found[key] = MISSING  # what leads to itself leads to nothing
            value: Any = source
            for name in key.split("."):
                value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
            found[key] = MISSING if isinstance(value, dict | list) else plain(value, depth + 1)
        return found[key]

    def plain(node: Any, depth: int = 0) -> Any:
        if isinstance(node, dict):
            return {str(key): plain(value) for key, value in node.items()}
        if not isinstance(node, str) or "${" not in node:
            return node
        if depth > MAX_REFERENCES or node.count("${") > MAX_REFERENCES:
            return MISSING
        values = {each[1]: referred(each[1], depth) for each in REFERENCE.finditer(node)}
        whole = REFERENCE.fullmatch(node)
        if whole is not None:
            return values[whole[1]]
        text = REFERENCE.sub(lambda each: str(values[each[1]])[: LONGEST + 1], node)
        return MISSING if "${" in text or MISSING in values.values() or len(text) > LONGEST else text

    return {str(key): plain(value) for key, value in source.items()}


def read_environment(text: str) -> dict[str, Any]:
    """Return the values of lines `export KEY=value`, by KEY in small letters; nothing is expanded."""
    pairs = [ENVIRONMENT.fullmatch(line.strip()) for line in text.splitlines()]
    return {pair[1].lower(): " ".join(shlex.split(pair[2], comments=True)) for pair in pairs if pair is not None}


def read_flags(text: str) -> dict[str, Any]:
    """Return flags as they are typed behind a script, `--key value`, `--key=value` or `--key` alone.

    Raises:
        ConfigError: quotes that do not close, or a value before the first flag.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"flags={text} cannot be read: {error}. Write them as they were typed.") from error
    given: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            given[key] = [value] if equals else []
        elif not given:
            raise ConfigError(f"flags={text} must begin with a flag such as --seed, not with {word}.")
        else:
            given[next(reversed(given))].append(word)
    return {key: [True, *map(scalar, found)][-1] if len(found) < 2 else found for key, found in given.items()}


def scalar(value: Any) -> Any:
    """Return the number or the truth that a text spells; other values as they are."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in WORDS:
        return WORDS[word]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return value


def found_beside(name: str, path: Path) -> Path | None:
    """Return a file that a configuration names: from here, from its folder or from those above; None = not there."""
    for folder in (Path(), *path.absolute().parents[:3]):
        if (folder / name).is_file():
            return folder / name
    return None


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings; lists are values."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


WORDS = {"true": True, "false": False, "none": None, "null": None}
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".json": ("JSON", read_json),
    ".toml": ("TOML", tomllib.loads),
    ".env": ("lines of KEY=value", read_environment),
}
"""Ending -> what it stands for, and what parses it; everything else is read as YAML, of which JSON is a part."""
