"""Limits of numbers in the typed nodes."""

from __future__ import annotations

from cascade_train.errors import ConfigError


def at_least(key: str, value: int | float | None, minimum: int | float) -> None:
    """Check that `value` is null or at least `minimum`.

    Raises:
        ConfigError: it is smaller.
    """
    if value is not None and value < minimum:
        raise ConfigError(f"{key}={value} must be {minimum} or more.")


def above(key: str, value: float | None, minimum: float) -> None:
    """Check that `value` is null or greater than `minimum`.

    Raises:
        ConfigError: it is not.
    """
    if value is not None and value <= minimum:
        raise ConfigError(f"{key}={value} must be greater than {minimum:g}.")
