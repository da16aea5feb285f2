"""Options of components: markers of what they mean to resumes, caches and saved configurations, and checks of values.

`num_workers: Free[int]` in a constructor; markers may be nested, and are read by config/arguments.py. Markers of
ranges, such as `shift: Positive[float]`, and Literals are checked by `check_fields`. A check raises a ConfigError that
names key, value and rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import regex

from cascade_train.errors import ConfigError

T = TypeVar("T")

Free = Annotated[T, "Free"]
"""Changes no sample and no number: a run may continue with another value, and a cache does not depend on it."""

Order = Annotated[T, "Order"]
"""Chooses which samples come and when, not what is made of one: a cache does not depend on it."""

File = Annotated[T, "File"]
"""Names a file, a folder or a hub id: saved as an absolute path where it exists, held by a cache by its content."""


def check_above(key: str, value: float, low: float) -> None:
    """Refuse a value that is not greater than `low`."""
    if not value > low:
        raise ConfigError(f"{key}={value} must be greater than {low}; give a larger {key}")


def check_least(key: str, value: float | None, low: float, why: str) -> None:
    """Refuse a number below `low`, with a reason or a remedy; None is not a number."""
    if value is not None and not value >= low:
        raise ConfigError(f"{key}={value} must be at least {low}: {why}")


AUTO = "auto"
"""In the place of a number that the device decides."""


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


LONGEST = 12.0**-0.5
"""Length of a mean over all steps: the standard deviation of a uniform distribution, relative to its range."""


def check_length(key: str, value: float) -> None:
    """Refuse the length of an average that no power function has."""
    if not 0.0 < value < LONGEST:
        raise ConfigError(
            f"{key}={value} must lie between 0 and {LONGEST:.4f}: it is the standard deviation of the steps averaged,"
            " relative to all steps, and that of a mean over all of them is the largest. Choose e.g. 0.1."
        )


MOST_BLOCKS = 1000
"""Blocks of a level of a network: ten times those of the deepest. A million take minutes to make, and no memory yet."""


def check_blocks(key: str, blocks: int | Sequence[int]) -> None:
    """Refuse a number of blocks, or one for each level, that no network has."""
    for number in [blocks] if isinstance(blocks, int) else blocks:
        check_within(key, number, 0, MOST_BLOCKS)


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


Positive = Annotated[T, partial(check_above, low=0)]
"""A number above 0."""

Several = Annotated[T, partial(check_above, low=1)]
"""A whole number of 2 or more."""

Share = Annotated[T, partial(check_within, low=0.0, high=1.0)]
"""A number in [0, 1]."""

Rising = Annotated[T, check_increasing]
"""Two numbers, the lower first."""


def check_fields(owner: Any, prefix: str = "") -> None:
    """Check the attributes of a dataclass by the markers and Literals of their types; None passes."""
    kind: Any = type(owner)
    for name, check, may_be_null in _field_checks(kind):
        if (value := getattr(owner, name)) is not None:
            try:
                check(f"{prefix}{name}", value)
            except ConfigError as error:
                raise ConfigError(f"{error}, or null") if may_be_null else error from None


@cache
def _field_checks(owner: Any) -> list[tuple[str, Callable[[str, Any], None], bool]]:
    try:
        hints = get_type_hints(owner, include_extras=True)
    except NameError:  # of a class of one's own, which imports it for type checkers alone
        return _field_checks(owner.__base__)
    return [(name, check, _may_be_null(hint)) for name, hint in hints.items() for check in _checks(hint)]


def _may_be_null(hint: Any) -> bool:
    nests = get_origin(hint) in (Annotated, Union, UnionType)
    return hint is NoneType or (nests and any(map(_may_be_null, get_args(hint))))


def _checks(hint: Any) -> Iterator[Callable[[str, Any], None]]:
    if get_origin(hint) is Literal:
        yield partial(check_choice, choices=get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from (marker for marker in hint.__metadata__ if callable(marker))
        yield from _checks(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if len(kinds) == 1:  # of several, the owner knows which a value is
            yield from _checks(kinds[0])


def check_pattern(key: str, pattern: str) -> None:
    """Raise a ValueError where this is no regular expression."""
    try:
        regex.compile(pattern)
    except (regex.error, TypeError) as error:
        raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}.") from error


def is_found(key: str, pattern: str, *names: str) -> bool:
    """Whether an expression is found in one of the names; a ConfigError where that takes too long."""
    try:
        return any(regex.search(pattern, name, timeout=1.0) is not None for name in names)
    except TimeoutError as error:
        raise ConfigError(f"{key}: {pattern!r} takes too long on {names[0]}; simplify it") from error


def check_found(key: str, patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise a ConfigError where an expression is the first that is found in no name of what there is.

    `what` is such as "weights that train". Of a name with several lines each is searched.
    """
    first: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if is_found(key, pattern, *name.split("\n"))]
        if not matched:
            shown = ", ".join(name.partition("\n")[0] for name in names[:: max(1, len(names) // 3)][:3])
            raise ConfigError(
                f"{key}: {pattern!r} is found in no name of the {len(names)} {what}; they are such as {shown}"
            )
        if first.keys() >= set(matched):
            earlier = ", ".join(repr(other) for other in dict.fromkeys(first[name] for name in matched))
            raise ConfigError(
                f"{key}: {pattern!r} decides nothing, {earlier} before it takes all {len(matched)} of its {what}; put"
                " it first, or remove it"
            )
        first = dict.fromkeys(matched, pattern) | first
