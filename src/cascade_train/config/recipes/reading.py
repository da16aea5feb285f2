"""Files of other trainers as plain values: YAML, JSON, TOML, lines of `export KEY=value`, and flags as they are typed.

No expression is run: an interpolation is followed where it leads to a value of the same file, and nowhere else. What a
file names is opened where it is a small regular file in the folder of the file that names it.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import MAX_DEPTH, check_yaml, read_json, read_regular

MAX_BYTES = 1_000_000
REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
MAX_REFERENCES, LONGEST = 20, 10_000
"""Interpolations that are followed, one behind the other or within one text, and characters of the text they make."""
ENVIRONMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)")
"""A line of a file that a shell reads."""
WORDS = {"true": True, "false": False, "none": None, "null": None, "": None}
NUMBER = re.compile(r"[+-]?(?=\.?\d)(0|[1-9]\d*)?(\.\d*)?(e[+-]?\d+)?")


def read_source(path: Path) -> Any:
    """Return the nested values of a file, by its ending; a ConfigError where there are none."""
    return parsed(read_regular(path, limit=MAX_BYTES), path)


def read_linked(name: str, source: Path) -> tuple[Path, bytes]:
    """Return a small regular file inside the folder of the configuration that names it, and its content.

    Names may begin at that folder or at one above it; a ValueError for any other file, and for links.
    """
    folder = source.absolute().parent
    for base in (folder, *folder.parents[:3]):
        path = Path(os.path.normpath(base / name))
        if folder in path.parents and os.path.lexists(path):
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                break
            return path, read_regular(path, limit=MAX_BYTES)
    raise ValueError(f"{name} is not in the folder of the file, and others are not opened")


def list_folder(name: str, source: Path) -> list[Path] | None:
    """Return the entries of a folder, sorted; None where it is not that of the configuration, or below it.

    Names begin at the working directory, as for their trainers. A link that leads elsewhere is not followed.
    """
    try:
        folder = Path(os.path.realpath(name, strict=True))
        inside = folder.is_relative_to(os.path.realpath(source.absolute().parent))
        return sorted(Path(name, each.name) for each in folder.iterdir()) if inside else None
    except (OSError, ValueError):
        return None


def parsed(content: bytes, path: Path) -> Any:
    """Return the values of a text, by the ending of its file; a ConfigError where they are none."""
    form, reader = READERS.get(path.suffix, ("YAML", _read_yaml))
    try:
        source = reader(content.decode("utf-8-sig"))
    except (ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{path} cannot be read as {form}: {reason}. Give another file, or mend it.") from error
    if isinstance(source, dict) or (isinstance(source, list) and source and all(isinstance(s, dict) for s in source)):
        return source
    raise ConfigError(f"{path} holds no keys and values. Name a training configuration.")


def _read_yaml(text: str) -> Any:
    check_yaml(text)
    source = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    return resolved(source) if isinstance(source, dict) else source


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
    """Return flags as they are typed behind a script, `--key value`, `--key=value` or `--key` alone."""
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
    """Return the number, the truth or the nothing that a text spells; other values as they are."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".e") else int(word)
    return WORDS.get(word, value)


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings; lists are values."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_toml(text: str) -> Any:
    """Parse TOML whose keys have no more parts than values may have levels: tomllib's memory is quadratic in them."""
    if re.search(r"(?:\.[\w\-\"' ]{0,64}){" + str(MAX_DEPTH) + "}", text):
        raise ValueError(f"a key is nested deeper than {MAX_DEPTH} levels")
    return tomllib.loads(text)


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".json": ("JSON", read_json),
    ".toml": ("TOML", _read_toml),
    ".env": ("lines of KEY=value", read_environment),
}
"""Ending -> the form's name and its parser; everything else is read as YAML, of which JSON is a part."""
