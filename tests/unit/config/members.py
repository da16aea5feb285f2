"""Constructors of every form, for the reader of signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Optional, Protocol, Union

CONSTANT = 3
Sizes = list[int]


class Plain:
    """Has a constructor.

    Args:
        size: side in pixels;
            must be even.
        name: of the thing.
    """

    name = "plain"
    fits: ClassVar[tuple[str, ...]] = ("stage_c",)

    def __init__(self, *, size: int, name: str = "x") -> None: ...

    @classmethod
    def build(cls, size: int) -> Plain: ...

    @staticmethod
    def pure(size: int) -> int: ...


class Child(Plain):
    fits = ("stage_b",)


class Orphan(type("Base", (), {})):  # type: ignore[misc]
    """Its base has no source."""


@dataclass(kw_only=True)
class Data:
    kind: ClassVar[str] = "data"
    first: int
    """The first."""
    second: list[int] = field(default_factory=list)
    third: int = 3
    made: int = field(init=False, default=0)


@dataclass(kw_only=True)
class DataChild(Data):
    fourth: str = field(metadata={})
    """The fourth,
    told in two lines."""
    fifth: str = field(default="x")


class Empty: ...


class Made:
    def __new__(cls, size: int) -> Made:
        """Make.

        Args:
            size: told by the constructor.
        """


class Open:
    def __init__(self, **options: Any) -> None: ...


def function(size: int) -> int: ...


class Mode(StrEnum):
    fast = "fast"


class Speaks(Protocol):
    def speak(self) -> str: ...


def annotated(
    *,
    integer: int,
    number: float,
    flag: bool,
    text: str,
    path: Path,
    maybe: int | None,
    old: Optional[int],  # noqa: UP045
    either: Union[int, str],  # noqa: UP007
    many: list[int],
    several: Sequence[str | None],
    pair: tuple[float, float],
    run: tuple[int, ...],
    table: Mapping[str, int],
    word: Literal["a", "b", 1, None],
    anything: Any,
    alias: Sizes,
    quoted: "int",  # noqa: UP037
    mode: Mode,
    plain: Plain,
    maybe_plain: Plain | None,
    plains: list[Plain],
    speaks: Speaks,
    call: Callable[..., int],
    bare: list,
    bare_call: Callable,
    unknown: NotThere,  # type: ignore[name-defined]  # noqa: F821
    untold,  # type: ignore[no-untyped-def]
) -> None: ...
