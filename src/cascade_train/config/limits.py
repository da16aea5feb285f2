"""Ranges of numbers in the configuration and in arguments of commands."""

from __future__ import annotations

import math

from cascade_train.errors import ConfigError

AUTO = "auto"
"""In the place of a number that the device decides."""

LONGEST = 12.0**-0.5
"""Length of a mean over all steps: the standard deviation of a uniform distribution, relative to its range."""


def limit(config: object, node: str, *keys: str, least: float = -math.inf, above: float = -math.inf) -> None:
    """Refuse a key of a node, or argument of a command, below `least` or not above `above`; null is neither."""
    for key in keys:
        value = getattr(config, key)
        if value is not None and value != AUTO and (value < least or value <= above):
            rule = f"{least} or more" if value < least else f"greater than {above:g}"
            raise ConfigError(f"{node}{'.' * bool(node)}{key}={value} must be {rule}.")


def number_or_auto(config: object, node: str, key: str, kind: type[int] | type[float]) -> None:
    """Refuse a key of a node that is neither a number of this kind, auto nor null; make a number of its text."""
    value = getattr(config, key)
    if value in (AUTO, None):
        return
    try:
        number = kind(str(value))
        if not math.isfinite(number):
            raise ValueError
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{node}.{key}={value} must be {words}, {AUTO} or null.") from None
    setattr(config, key, number)


def check_length(key: str, value: float) -> None:
    """Refuse the length of an average that no power function has."""
    if not 0.0 < value < LONGEST:
        raise ConfigError(
            f"{key}={value} must lie between 0 and {LONGEST:.4f}: it is the standard deviation of the steps averaged,"
            " relative to all steps, and that of a mean over all of them is the largest. Choose e.g. 0.1."
        )
