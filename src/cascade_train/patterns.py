"""Regular expressions by which users name weights and modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import regex

from cascade_train.errors import ConfigError


def check_pattern(key: str, pattern: str) -> None:
    """Raise a ValueError where this is no regular expression."""
    try:
        regex.compile(pattern)
    except (regex.error, TypeError) as error:
        raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}.") from error


def is_found(key: str, pattern: str, *names: str) -> bool:
    """Return whether an expression is found in one of the names; a ConfigError where that takes too long."""
    try:
        return any(regex.search(pattern, name, timeout=1.0) is not None for name in names)
    except TimeoutError as error:
        raise ConfigError(f"{key}: {pattern!r} takes too long on {names[0]}; simplify it") from error


def check_found(key: str, patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise a ConfigError where an expression is found in no name of what there is, such as "weights that train"."""
    for pattern in patterns:
        if not any(is_found(key, pattern, *name.split("\n")) for name in names):
            shown = ", ".join(name.partition("\n")[0] for name in names[:: max(1, len(names) // 3)][:3])
            raise ConfigError(
                f"{key}: {pattern!r} is found in no name of the {len(names)} {what}; they are such as {shown}"
            )
