"""Values of expressions in source, evaluated without running it; the statements around them are walked in guards.py."""

from __future__ import annotations

import ast
import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cascade_train.config.static.static_source import Definition, Module, lookup_expression, module_file

PURE: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (abs, all, any, bool, float, int, isinstance, len, list, max, min, set, str, tuple)
}
TYPES = {"Mapping": Mapping, "Sequence": Sequence}


class UnknownError(Exception):
    """The source alone does not tell a value, or what a statement does."""


def _is(one: object, other: object) -> bool:
    if not any(value is None or isinstance(value, bool) for value in (one, other)):
        raise UnknownError  # the walk copies what the constructor does not
    return one is other


OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: _is, ast.IsNot: lambda a, b: not _is(a, b), ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Not: operator.not_,
    ast.USub: operator.neg,
}  # fmt: skip
UNKNOWN = object()
"""In the place of a value that is not known."""

SELF = object()
"""In the place of the object that is constructed."""


@dataclass
class Walk:
    """What the functions of one walk share.

    Attributes:
        chain: the class that is constructed, and its bases; empty for a function.
        attributes: the object's.
        opaque: names that a class binds to more than a literal, such as methods and properties.
        escaped: whether code that is not walked may have changed the object.
        touched: whether such code may have changed a list or a mapping.
    """

    chain: Sequence[Definition]
    attributes: dict[str, Any] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    escaped: bool = False
    touched: bool = False

    def readable(self, value: Any) -> Any:
        """Return a value that is known still."""
        if value is UNKNOWN or value is SELF or (self.touched and not is_constant(value)):
            raise UnknownError
        return value

    def attribute(self, name: str) -> Any:
        """Return the value of an attribute that is known still."""
        if self.escaped or name in self.opaque:
            raise UnknownError
        return self.readable(self.attributes[name])


@dataclass
class Scope:
    """One call of a function.

    Attributes:
        walk: what all calls share.
        module: where names that are not local are looked up.
        names: the values of all local names.
        level: position in the chain of the class that holds the function.
        depth: calls around this one.
    """

    walk: Walk
    module: Module
    names: dict[str, Any] = field(default_factory=dict)
    level: int = 0
    depth: int = 0


def global_definition(node: ast.Name, scope: Scope) -> Definition:
    """Return what the module binds once to a name, and the module that it is from too."""
    found = lookup_expression(scope.module, node)
    if found is not None and node.id not in scope.names and _bindings(scope.module)[node.id] == 1:
        match found.node:
            case (
                ast.FunctionDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr())
            ) if _bindings(found.module)[name] == 1:
                return found
    raise UnknownError


def _bindings(module: Module) -> Counter[str]:
    """Return how often a module binds each name, anywhere; nothing where `import *` may bind any."""
    return Counter() if module.stars else _bindings_of(module.name)


@functools.cache
def _bindings_of(module: str) -> Counter[str]:
    path = module_file(module)
    assert path is not None
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                counts[name] += 1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                counts[name] += 1
            case ast.alias(name=name, asname=other):
                counts[other or name.partition(".")[0]] += 1
    return counts


def stored(node: ast.AST) -> set[str]:
    """Return the names that are bound in a node."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}


def literal(node: ast.expr | None) -> Any:
    """Return a literal that nothing can change, or `UNKNOWN`."""
    with suppress(ValueError, TypeError):
        value = UNKNOWN if node is None else ast.literal_eval(node)
        return value if is_constant(value) else UNKNOWN
    return UNKNOWN


def is_constant(value: Any) -> bool:
    """Return whether nothing can change a value: it has a hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def evaluate(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression.

    Raises:
        UnknownError: it holds more than is evaluated here; other errors are those of its operations.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _name(name, node, scope)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if scope.names.get(name) is SELF:
            return scope.walk.attribute(attribute)
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), key]) if scope.names.get(name) is SELF:
            return scope.walk.attribute(evaluate(key, scope))
        case ast.Tuple(elts=items):
            return tuple(evaluate(item, scope) for item in items)
        case ast.List(elts=items):
            return [evaluate(item, scope) for item in items]
        case ast.JoinedStr() | ast.FormattedValue():
            return _text(node, scope)
    return _operation(node, scope)


def _operation(node: ast.expr, scope: Scope) -> Any:
    match node:
        case ast.BoolOp(op=op, values=values):
            return _bool(isinstance(op, ast.And), values, scope)
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](evaluate(operand, scope))
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](evaluate(left, scope), evaluate(right, scope))
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [evaluate(each, scope) for each in [left, *others]]
            return all(OPERATORS[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return evaluate(body if evaluate(test, scope) else orelse, scope)
        case ast.Subscript(value=value, slice=key) if not isinstance(key, ast.Slice):
            return evaluate(value, scope)[evaluate(key, scope)]
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="join"), args=[items]):
            return text.join(evaluate(items, scope))
        case ast.Call(func=ast.Name(id=name) as func, args=args, keywords=[]) if name in PURE:
            return _name(name, func, scope)(*(evaluate(each, scope) for each in args))
    raise UnknownError


def _text(node: ast.JoinedStr | ast.FormattedValue, scope: Scope) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(evaluate(each, scope)) for each in node.values)
    value = evaluate(node.value, scope)
    conversions: dict[int, Callable[[object], str]] = {ord("r"): repr, ord("s"): str, ord("a"): ascii}
    value = conversions[node.conversion](value) if node.conversion in conversions else value
    return format(value, "" if node.format_spec is None else evaluate(node.format_spec, scope))


def _bool(is_and: bool, values: Sequence[ast.expr], scope: Scope) -> Any:
    value: Any = is_and
    for each in values:
        value = evaluate(each, scope)
        if bool(value) is not is_and:
            return value
    return value


def _name(name: str, node: ast.expr, scope: Scope) -> Any:
    """Return a local value, a builtin, a type to compare with, or a constant of the module."""
    if name in scope.names:
        return scope.walk.readable(scope.names[name])
    bound = scope.module.names.get(name)
    if name in PURE and not scope.module.stars and bound is None:
        return PURE[name]
    if name in TYPES and isinstance(bound, ast.ImportFrom) and bound.module in ("collections.abc", "typing"):
        return TYPES[name]
    assert isinstance(node, ast.Name)
    found = global_definition(node, scope).node
    return scope.walk.readable(literal(getattr(found, "value", None)))
