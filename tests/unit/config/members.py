"""Constructors of every form, for the reader of signatures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

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
    alias: Sizes,
    quoted: "int",  # noqa: UP037
    plain: Plain,
    unknown: NotThere,  # type: ignore[name-defined]  # noqa: F821
    untold,  # type: ignore[no-untyped-def]
) -> None: ...
