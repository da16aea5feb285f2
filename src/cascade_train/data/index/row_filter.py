"""Which samples take part, by conditions on their metadata (the json beside picture and caption, or columns).

A condition is a small part of Python's expressions and is never run as code: its text is parsed to a syntax tree, every
node of which must be one of those listed here, and the tree is walked with the values. No name is looked up outside
the arguments, so that a configuration from elsewhere can do no harm. Libraries that evaluate expressions allow
attributes or calls and are as safe as their block lists.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json

KEY = "data.row_filters"
VERSION = 1
"""Raised when the same text gets another meaning: cached verdicts are then made anew."""

ABSENT, FAILED, PASSED = 0, 1, 2
"""Verdicts: the sample lacks a key (or readable metadata), does not meet the condition, meets it."""

MAX_CHARACTERS, MAX_DEPTH, MAX_EXPONENT = 1000, 20, 8
LARGEST = 1e150
"""Arithmetic stops at numbers of this size, so that no condition can fill the memory."""

ALLOWED = "comparisons, and, or, not, in, + - * / // %, ** with a small whole exponent, numbers, quoted texts, lists"
_STARTS_WITH_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>|in\s|not\s+in\s)")
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
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
_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """Raised with the reason why a text is refused, and the node at fault."""


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """One condition on a sample's metadata."""

    keys: tuple[str, ...]  # whose values are the condition's arguments, in this order
    text: str  # as the user wrote it
    arguments: tuple[str, ...]  # the names of the values in the condition
    condition: ast.expr  # checked

    @property
    def name(self) -> str:
        """Keys and condition, for messages."""
        return f"{', '.join(self.keys)}: {self.text}"

    def verdict(self, metadata: Mapping[str, Any]) -> int:
        """Judge one sample: ABSENT, FAILED (also where the condition cannot be computed) or PASSED."""
        if any(key not in metadata for key in self.keys):
            return ABSENT
        values = {name: metadata[key] for name, key in zip(self.arguments, self.keys, strict=True)}
        try:
            return PASSED if _evaluate(self.condition, values) else FAILED
        except (TypeError, ArithmeticError, RecursionError):
            return FAILED


@dataclass(frozen=True)
class RowFilters:
    """All conditions of a run, in the order given; a sample takes part if it meets every one."""

    filters: tuple[RowFilter, ...] = ()

    def __len__(self) -> int:
        return len(self.filters)

    @property
    def identity(self) -> str:
        """16 hex digits that change with any filter, none for no filters."""
        if not self.filters:
            return ""
        text = json.dumps([VERSION, [[row_filter.keys, row_filter.text] for row_filter in self.filters]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def judge(self, values: Mapping[str, Any] | None) -> list[int]:
        """PASSED or ABSENT for a sample's values, None if they cannot be read, then each filter's verdict."""
        if values is None:
            return [ABSENT] * (1 + len(self))
        return [PASSED, *(row_filter.verdict(values) for row_filter in self.filters)]

    def verdicts(self, metadata: bytes | None) -> list[int]:
        """Judge one sample by its json, None where it has none. See `judge`."""
        return self.judge(read_metadata(metadata))

    def kept(self, verdicts: np.ndarray) -> np.ndarray:
        """Which of (N, 1 + filters) verdicts meet every filter, (N,) bool; logs how many, at least one."""
        kept, report = self.judged(verdicts)
        for line in report:
            _log.info("%s", line)
        return kept

    def judged(self, verdicts: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Which of the verdicts meet every filter, see `kept`, and lines on how many do."""
        kept = (verdicts == PASSED).all(axis=1)
        total, unread = len(verdicts), int((verdicts[:, 0] != PASSED).sum())
        report = [f"{KEY} keep {kept.sum()} of {total} samples ({kept.mean():.1%}); {unread} have no readable json"]
        for row_filter, verdict_N in zip(self.filters, verdicts[:, 1:].T, strict=True):
            passed, absent = (int((verdict_N == verdict).sum()) for verdict in (PASSED, ABSENT))
            report.append(f"{KEY} {row_filter.name}: {passed} pass ({passed / total:.1%}), {absent} lack the key")
        if not kept.any():
            raise ConfigError("row_filters leave no sample, so nothing can train; relax them. " + "; ".join(report))
        return kept, report


def parse_row_filters(value: object, *, key: str = KEY) -> RowFilters:
    """Parse a list of [key or keys, condition] or a mapping of keys to conditions; None = none."""
    if value is None:
        return RowFilters()
    entries: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping):
        entries = [(f"{key}.{name}", [name, condition]) for name, condition in value.items()]
    elif isinstance(value, list):
        entries = [(f"{key}[{number}]", entry) for number, entry in enumerate(value)]
    else:
        raise ValueError(f"{key}={value} must be a list of [key, condition] or a mapping of keys to conditions")
    return RowFilters(tuple(_row_filter(where, entry) for where, entry in entries))


def _row_filter(where: str, entry: Any) -> RowFilter:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        form = "[score, 'lambda s: s > 4.5'] or [[width, height], 'lambda w, h: w * h > 9']"
        raise ValueError(f"{where}={entry} is not a pair of a key and a condition, as {form} is")
    keys = entry[0] if isinstance(entry[0], list) else [entry[0]]
    if not keys or not all(isinstance(key, str) and key for key in keys):
        raise ValueError(f"{where}: {entry[0]!r} is not the name of a key in the samples' json, nor a list of names")
    arguments, condition = _parse(entry[1], keys, where)
    return RowFilter(keys=tuple(keys), text=entry[1], arguments=arguments, condition=condition)


def read_metadata(metadata: bytes | None) -> Mapping[str, Any] | None:
    """A sample's json as a mapping; None where there is none that can be read."""
    try:
        values = None if metadata is None else read_json(metadata)
    except ValueError:
        return None
    return values if isinstance(values, Mapping) else None


def _parse(text: str, keys: Sequence[str], where: str) -> tuple[tuple[str, ...], ast.expr]:
    """Names of the arguments of a condition, one for each of `keys`, and its checked tree."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{where}: {text[:20]!r}... has more than {MAX_CHARACTERS} characters; split the filter")
    is_short = _STARTS_WITH_COMPARISON.match(text) is not None
    source, names = (f"_ {text}", ("_",) * len(keys)) if is_short else (text, tuple(keys))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(source, mode="eval").body
        if is_short and len(keys) != 1:
            raise _RefusedError(f"a comparison without its left side is for one key, not {len(keys)}", body)
        if isinstance(body, ast.Lambda):
            names, body = _arguments(body, keys), body.body
        _check(body, set(names), 0)
        return names, body
    except _RefusedError as error:
        reason, node = error.args
        start = len(source.encode()[: node.col_offset].decode(errors="ignore")) + 1
        faulty = ast.get_source_segment(source, node)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = f"this is no expression ({getattr(error, 'msg', type(error).__name__)})"
        start = getattr(error, "offset", None) or 1
        faulty = source[start - 1 : start]
    start = max(1, start - len(source) + len(text))
    raise ValueError(
        f"{where}: {text!r} is refused at character {start} ({faulty!r}): {reason}."
        f" Allowed are {ALLOWED}, as in 'lambda s: s > 4.5', '<=0.5' or 'width * height >= 600 ** 2'"
    )


def _arguments(node: ast.Lambda, keys: Sequence[str]) -> tuple[str, ...]:
    spec = node.args
    is_plain = not (spec.posonlyargs or spec.kwonlyargs or spec.vararg or spec.kwarg or spec.defaults)
    if not is_plain or len(spec.args) != len(keys):
        plural = "s" if len(keys) > 1 else ""
        names = ", ".join(keys)
        raise _RefusedError(f"the lambda must take {len(keys)} plain argument{plural}, one for each of {names}", node)
    return tuple(argument.arg for argument in spec.args)


def _check(node: ast.expr, names: set[str], depth: int) -> None:
    fault = "it is nested too deeply" if depth > MAX_DEPTH else _fault(node, names)
    if fault:
        raise _RefusedError(fault, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            _check(child, names, depth + 1)


def _fault(node: ast.expr, names: set[str]) -> str | None:
    match node:
        case ast.Name():
            known = " and ".join(sorted(names - {"_"})) or "none"
            return None if node.id in names else f"the name {node.id} is unknown; known here: {known}"
        case ast.Constant(value=None | bool() | str()) | ast.BoolOp() | ast.List() | ast.Tuple():
            return None
        case ast.Constant(value=int() | float() as number):
            return None if abs(number) < LARGEST else "the number is too large"
        case ast.Constant():
            return f"a constant of type {type(node.value).__name__} is not allowed"
        case ast.BinOp(op=ast.Pow(), right=exponent):
            is_small = isinstance(exponent, ast.Constant) and exponent.value in range(MAX_EXPONENT + 1)
            return None if is_small else f"an exponent must be a whole number from 0 to {MAX_EXPONENT}"
        case ast.BinOp() | ast.UnaryOp():
            return None if type(node.op) in _OPERATORS else "this operator is not allowed"
        case ast.Compare():
            pairs = zip(node.ops, node.comparators, strict=True)
            compared = [right for op, right in pairs if isinstance(op, ast.Is | ast.IsNot)]
            are_words = all(isinstance(word, ast.Constant) and isinstance(word.value, bool | None) for word in compared)
            return None if are_words else "`is` is for None, True and False; compare by =="
    return f"{type(node).__name__.lower()}s are not allowed"


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name():
            return values[node.id]
        case ast.Constant():
            return node.value
        case ast.BinOp():
            left, right = _number(_evaluate(node.left, values)), _number(_evaluate(node.right, values))
            return _OPERATORS[type(node.op)](left, right)
        case ast.UnaryOp():
            value = _evaluate(node.operand, values)
            return _OPERATORS[type(node.op)](value if isinstance(node.op, ast.Not) else _number(value))
        case ast.BoolOp():
            return _evaluate_logic(node, values)
        case ast.Compare():
            return _evaluate_comparison(node, values)
        case ast.List() | ast.Tuple():
            return [_evaluate(element, values) for element in node.elts]
    raise AssertionError(f"{type(node).__name__} was checked before")


def _number(value: Any) -> int | float:
    """Refuse what is not a number of ordinary size: texts and lists would grow by arithmetic."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    if not abs(value) < LARGEST:
        raise OverflowError("too large to compute with")
    return value


def _evaluate_logic(node: ast.BoolOp, values: Mapping[str, Any]) -> Any:
    """First operand that decides, as Python's and/or do, else the last."""
    for operand in node.values:
        value = _evaluate(operand, values)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def _evaluate_comparison(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _evaluate(node.left, values)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, values)
        if not _OPERATORS[type(op)](left, right):
            return False
        left = right
    return True
