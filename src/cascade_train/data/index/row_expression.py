"""Conditions on metadata values, written as a small part of Python's expressions and never run as code.

A text is parsed to a syntax tree, every node of which must be one of those listed here, and the tree is then walked
with the values. Nothing is compiled and no name is looked up outside the arguments of the condition, so that a
configuration from elsewhere can do no harm. Libraries that evaluate expressions allow attributes or calls and are as
safe as their block lists.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 1000
MAX_DEPTH = 20
MAX_EXPONENT = 8
LARGEST = 1e150
"""Arithmetic stops at numbers of this size, so that no condition can fill the memory."""

ALLOWED = "comparisons, and, or, not, in, + - * / // %, ** with a small whole exponent, numbers, quoted texts, lists"
_STARTS_WITH_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>|in\s|not\s+in\s)")
_ARITHMETIC: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: Mapping[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_REFUSED: Mapping[type[ast.AST], str] = {
    ast.Call: "calls are not allowed",
    ast.Attribute: "attributes are not allowed",
    ast.Subscript: "square brackets behind a value are not allowed",
    ast.Lambda: "a lambda may only stand at the beginning",
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "comprehensions are not allowed"),
    ast.NamedExpr: "assignments are not allowed",
    ast.JoinedStr: "formatted texts are not allowed",
}


class _RefusedError(Exception):
    """Why a text is refused, and its characters [start, stop)."""

    def __init__(self, reason: str, start: int, stop: int) -> None:
        super().__init__(reason)
        self.reason, self.start, self.stop = reason, start, stop


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A harmless condition: the names of its arguments in the text, and its checked syntax tree."""

    names: tuple[str, ...]
    body: ast.expr

    def __call__(self, values: Sequence[Any]) -> bool:
        """Return whether the values, one per name, meet the condition; False where it cannot be computed."""
        try:
            return bool(_value(self.body, dict(zip(self.names, values, strict=True))))
        except (TypeError, ArithmeticError, RecursionError):
            return False


def parse_expression(text: str, keys: Sequence[str], *, where: str) -> Expression:
    """Parse a condition on the values of `keys`; a ValueError names `where`, the configuration's key, and the place.

    The text is a lambda with one argument per key, `lambda s: s > 4.5`; for one key a comparison without its left side,
    `<=0.5`; or an expression in the names of the keys, `width * height >= 600 ** 2`.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: a condition of {len(text)} characters, {text[:20]!r}..., is longer than the {MAX_CHARACTERS}"
            " that are read; split it into several filters"
        )
    offset = 0
    try:
        if _STARTS_WITH_COMPARISON.match(text):
            offset = len("_ ")
        return _parse("_ " + text if offset else text, keys, short=offset > 0)
    except _RefusedError as error:
        start, stop = max(0, error.start - offset), max(1, error.stop - offset)
        raise ValueError(
            f"{where}: {text!r} is refused at character {start + 1} ({text[start:stop]!r}): {error.reason}."
            f" Allowed are {ALLOWED}, as in 'lambda s: s > 4.5', '<=0.5' or 'width * height >= 600 ** 2'"
        ) from None


def _parse(source: str, keys: Sequence[str], *, short: bool) -> Expression:
    body = _tree(source)
    if short:
        if len(keys) != 1:
            raise _RefusedError(f"a comparison without its left side is for one key, not {len(keys)}", 0, len(source))
        names: tuple[str, ...] = ("_",)
    elif isinstance(body, ast.Lambda):
        names, body = _arguments(body, keys, source), body.body
    else:
        names = tuple(keys)
    _check(body, set(names), source, 0)
    return Expression(names=names, body=body)


def _tree(source: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source, mode="eval").body
    except SyntaxError as error:
        at = max(0, (error.offset or 1) - 1)
        raise _RefusedError(f"this is no expression ({error.msg})", at, at + 1) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise _RefusedError(f"this cannot be read ({type(error).__name__})", 0, len(source)) from None


def _arguments(node: ast.Lambda, keys: Sequence[str], source: str) -> tuple[str, ...]:
    found = node.args
    plain = not (found.posonlyargs or found.kwonlyargs or found.vararg or found.kwarg or found.defaults)
    if not plain or len(found.args) != len(keys):
        start, _ = _place(node, source)
        raise _RefusedError(
            f"the lambda must take {len(keys)} plain argument{'s' if len(keys) > 1 else ''}, one for each of"
            f" {', '.join(keys)}",
            start,
            _place(node.body, source)[0],
        )
    return tuple(argument.arg for argument in found.args)


def _check(node: ast.expr, names: set[str], source: str, depth: int) -> None:
    """Refuse everything that is not listed here."""
    fault = "it is nested too deeply" if depth > MAX_DEPTH else _fault(node, names)
    if fault:
        raise _RefusedError(fault, *_place(node, source))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            _check(child, names, source, depth + 1)


def _fault(node: ast.expr, names: set[str]) -> str | None:
    """Return what is wrong with a node itself; None = nothing."""
    match node:
        case ast.Name():
            known = " and ".join(sorted(names - {"_"})) or "none"
            return None if node.id in names else f"the name {node.id} is unknown; known here: {known}"
        case ast.Constant(value=None | bool() | str()):
            return None
        case ast.Constant(value=int() | float() as number):
            return None if abs(number) < LARGEST else "the number is too large"
        case ast.Constant():
            return f"a constant of type {type(node.value).__name__} is not allowed"
        case ast.BinOp(op=ast.Pow(), right=exponent):
            small = isinstance(exponent, ast.Constant) and exponent.value in range(MAX_EXPONENT + 1)
            return None if small else f"an exponent must be a whole number from 0 to {MAX_EXPONENT}"
        case ast.BinOp():
            return None if type(node.op) in _ARITHMETIC else "this operator is not allowed"
        case ast.UnaryOp():
            return None if type(node.op) in _SIGNS or isinstance(node.op, ast.Not) else "this operator is not allowed"
        case ast.Compare():
            pairs = zip(node.ops, node.comparators, strict=True)
            odd = any(isinstance(op, ast.Is | ast.IsNot) and not _is_word(right) for op, right in pairs)
            return "`is` is for None, True and False; compare by ==" if odd else None
        case ast.BoolOp() | ast.List() | ast.Tuple():
            return None
    return _REFUSED.get(type(node), f"{type(node).__name__} is not allowed")


def _is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _place(node: ast.expr, source: str) -> tuple[int, int]:
    """Return a node's first character and the one behind its last; `ast` counts lines and bytes."""

    def character(line: int, byte: int) -> int:
        lines = source.splitlines(keepends=True)
        return len("".join(lines[: line - 1])) + len(lines[line - 1].encode()[:byte].decode())

    return character(node.lineno, node.col_offset), character(node.end_lineno or 1, node.end_col_offset or 0)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Compute a checked tree."""
    match node:
        case ast.Name():
            return values[node.id]
        case ast.Constant():
            return node.value
        case ast.BinOp():
            left, right = _number(_value(node.left, values)), _number(_value(node.right, values))
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, values)
        case ast.UnaryOp():
            return _SIGNS[type(node.op)](_number(_value(node.operand, values)))
        case ast.BoolOp():
            return _joined(node, values)
        case ast.Compare():
            return _compared(node, values)
        case ast.List() | ast.Tuple():
            return [_value(element, values) for element in node.elts]
    raise AssertionError(f"{type(node).__name__} was checked before")


def _number(value: Any) -> int | float:
    """Refuse what is not a number of ordinary size: texts and lists would grow by arithmetic."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    if not abs(value) < LARGEST:
        raise OverflowError("too large to compute with")
    return value


def _joined(node: ast.BoolOp, values: Mapping[str, Any]) -> Any:
    """Return the value that Python's and/or would: the first that decides, else the last."""
    for operand in node.values:
        value = _value(operand, values)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def _compared(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _value(comparator, values)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True
