"""The library's source as syntax trees, for the tests of this folder. Reads files; imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "cascade_train"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One parsed file.

    Attributes:
        path: where it lies.
        tree: its syntax tree.
        room: the folder below the package; its own name for files beside the folders.
    """

    path: Path
    tree: ast.Module
    room: str

    @property
    def name(self) -> str:
        """Return the path below the checkout, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    def functions(self) -> Iterator[Function]:
        """Yield every function and method, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield (absolute module name, line) of every import, also inside functions and under TYPE_CHECKING."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                # `from a.b import c` may import the module a.b.c: name both for the packages of this library
                yield node.module, node.lineno
                if node.module == "cascade_train":
                    yield from ((f"cascade_train.{alias.name}", node.lineno) for alias in node.names)


def room_of(path: Path) -> str:
    """Return the room that a file of the package belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def library() -> tuple[SourceFile, ...]:
    """Return every Python file of the package, parsed."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(SourceFile(path, ast.parse(path.read_text()), room_of(path)) for path in paths)


def in_rooms(*rooms: str) -> list[SourceFile]:
    """Return the files of some rooms."""
    return [file for file in library() if file.room in rooms]


def text_of(node: ast.expr) -> list[str]:
    """Return the literal parts of a string expression: of a literal, an f-string or a sum of them."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return []
