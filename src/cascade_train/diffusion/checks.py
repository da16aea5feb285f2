"""Range checks of constructors; each raises a ConfigError that names key, value and rule."""

from __future__ import annotations

from collections.abc import Sequence

from cascade_train.errors import ConfigError


def check_above(key: str, value: float, low: float) -> None:
    """Refuse a value that is not greater than `low`."""
    if not value > low:
        raise ConfigError(f"{key}={value} must be greater than {low}; give a larger {key}")


def check_within(key: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"{key}={value} must lie in [{low}, {high}]; bring it inside")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key}={value} is unknown; choose one of {', '.join(choices)}")


def check_increasing(key: str, pair: Sequence[float]) -> None:
    """Refuse what is not two numbers [low, high] with low < high."""
    if len(pair) != 2 or not pair[0] < pair[1]:
        raise ConfigError(f"{key}={list(pair)} must be two numbers [low, high] with low < high; swap or change them")
