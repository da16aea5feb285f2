"""The checks with which constructors begin, evaluated from their source: a wrong value is refused before any import.

A check is `if <condition>: raise ValueError(...)`, also in loops and in functions that the constructor calls. What
depends on anything but the arguments, literals and a few pure functions is left to the constructor itself. Nothing here
runs code: the source is walked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cascade_train.config.source import Definition, Module, lookup_expression

PURE: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (abs, all, any, bool, float, getattr, int, isinstance, len, list, max, min, set, str, tuple)
}  # fmt: skip
TYPES = {"Mapping": Mapping, "Sequence": Sequence}
REFUSALS = {"ValueError", "ConfigError"}
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Not: operator.not_,
    ast.USub: operator.neg,
}  # fmt: skip


UNKNOWN = object()
"""In the place of an argument whose value is not known."""


class UnknownError(Exception):
    """The source alone does not tell a value."""


class Refused(Exception):  # noqa: N818 - what a guard says, and no error of this file
    """A guard refuses the arguments, with its message."""


class _Returned(Exception):  # noqa: N818 - control flow
    """A function returned, or may have."""


@dataclass
class Scope:
    """Names that are known while a body is walked.

    Attributes:
        module: where other names are looked up.
        chain: the class that is constructed, and its bases; empty in a plain function.
        names: known values.
    """

    module: Module
    chain: Sequence[Definition]
    names: dict[str, Any] = field(default_factory=dict)


def refusal(chain: Sequence[Definition], given: Mapping[str, Any]) -> str | None:
    """Return what a constructor's checks say against its arguments; None = nothing that can be told here.

    Args:
        chain: a class and its bases, or a function alone.
        given: arguments by name; `UNKNOWN` for those whose value is not known, such as components.
    """
    first = chain[0]
    try:
        if isinstance(first.node, ast.FunctionDef):
            _call(first, Scope(first.module, []), [], given)
        else:
            _construct(chain, given)
    except Refused as refused:
        return str(refused)
    return None


def _construct(chain: Sequence[Definition], given: Mapping[str, Any], positional: Sequence[Any] = ()) -> None:
    """Walk the constructor of the first class that has one, else the `__post_init__` of a dataclass."""
    for position, definition in enumerate(chain):
        methods = {s.name: s for s in _body(definition) if isinstance(s, ast.FunctionDef)}
        if "__init__" in methods:
            own = Definition(definition.module, methods["__init__"])
            return _call(own, Scope(definition.module, chain[position:]), [SimpleNamespace(), *positional], given)
        if "__post_init__" in methods:
            values = _field_defaults(chain) | dict(given)
            fields = SimpleNamespace(**{name: value for name, value in values.items() if value is not UNKNOWN})
            own = Definition(definition.module, methods["__post_init__"])
            return _call(own, Scope(definition.module, chain[position:]), [fields], {})
    return None


def _field_defaults(chain: Sequence[Definition]) -> dict[str, Any]:
    """Return the literal defaults of a dataclass's fields, and its class constants."""
    values: dict[str, Any] = {}
    for definition in reversed(chain):
        for statement in _body(definition):
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                values[ast.unparse(statement.target)] = _known(statement.value, Scope(definition.module, []))
    return values


def _call(function: Definition, scope: Scope, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Walk a function's body under its arguments."""
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    arguments = [*node.args.posonlyargs, *node.args.args]
    defaults: list[tuple[ast.arg, ast.expr | None]] = [*zip(arguments[::-1], node.args.defaults[::-1], strict=False)]
    defaults += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    values = {a.arg: default.value for a, default in defaults if isinstance(default, ast.Constant)}
    known = {argument.arg for argument in [*arguments, *node.args.kwonlyargs]}
    values |= {a.arg: value for a, value in zip(arguments, positional, strict=False)}
    values |= {name: value for name, value in named.items() if name in known}
    scope.names = {name: value for name, value in values.items() if value is not UNKNOWN}
    try:
        _walk(node.body, scope)
    except _Returned:
        return


def _walk(body: Sequence[ast.stmt], scope: Scope) -> None:
    for statement in body:
        try:
            _step(statement, scope)
        except (Refused, _Returned):
            raise
        except Exception:  # noqa: BLE001 - whatever fails here is not known here; the constructor decides
            inside = list(ast.walk(statement))
            for node in inside:
                _forget(node, scope)
            if any(isinstance(n, ast.Return) for n in inside):
                raise _Returned from None


def _forget(node: ast.AST, scope: Scope) -> None:
    """Drop the value of what a statement assigns whose value is not known."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            scope.names.pop(name, None)
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) if "self" in scope.names:
            vars(scope.names["self"]).pop(name, None)


def _step(statement: ast.stmt, scope: Scope) -> None:
    match statement:
        case ast.If(test=test):
            _walk(statement.body if evaluate(test, scope) else statement.orelse, scope)
        case ast.For(target=target, iter=values) if not statement.orelse:
            for value in evaluate(values, scope):
                _assign(target, value, scope)
                _walk(statement.body, scope)
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message])) if name in REFUSALS:
            raise Refused(evaluate(message, scope))
        case ast.Return():
            raise _Returned
        case ast.Assign(value=ast.Call(func=ast.Name(id=name)) as call) if name not in PURE:
            _call_known(call, scope)
            raise UnknownError  # what it returns
        case ast.Assign(targets=[target], value=value):
            _assign(target, evaluate(value, scope), scope)
        case ast.Expr(value=ast.Call() as call):
            _call_known(call, scope)
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            pass
        case _:
            raise UnknownError


def _assign(target: ast.expr, value: Any, scope: Scope) -> None:
    if isinstance(target, ast.Tuple):
        for part, each in zip(target.elts, value, strict=True):
            _assign(part, each, scope)
    elif isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
        setattr(scope.names["self"], target.attr, value)
    else:
        raise UnknownError


def _call_known(call: ast.Call, scope: Scope) -> None:
    """Walk a call of a function, a method of the class, or its base's constructor."""
    named = {word.arg: _known(word.value, scope) for word in call.keywords if word.arg}
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            _construct(scope.chain[1:], named, [_known(each, scope) for each in call.args])
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
            _method(scope.chain[1:], name, scope)
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if not call.args and not call.keywords:
            _method(scope.chain, name, scope)
        case ast.Name():
            found = lookup_expression(scope.module, call.func)
            if found is None or not isinstance(found.node, ast.FunctionDef):
                raise UnknownError
            _call(found, Scope(found.module, []), [evaluate(each, scope) for each in call.args], named)
        case _:
            raise UnknownError


def _method(chain: Sequence[Definition], name: str, scope: Scope) -> None:
    for position, definition in enumerate(chain):
        for statement in _body(definition):
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                own = Definition(definition.module, statement)
                return _call(own, Scope(definition.module, chain[position:]), [scope.names.get("self")], {})
    raise UnknownError


def _known(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression, or `UNKNOWN`."""
    try:
        return evaluate(node, scope)
    except Exception:  # noqa: BLE001 - as in `_walk`
        return UNKNOWN


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
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if "self" in scope.names:
            return getattr(scope.names["self"], name)
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
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in PURE:
            return PURE[name](*(evaluate(each, scope) for each in args))
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
    """Return a local value, a type to compare with, or a constant of the module."""
    if name in scope.names:
        return scope.names[name]
    if name in PURE or name in TYPES:
        return {**PURE, **TYPES}[name]
    found = lookup_expression(scope.module, node)
    if found is None or not isinstance(found.node, ast.Assign | ast.AnnAssign) or found.node.value is None:
        raise UnknownError
    return evaluate(found.node.value, Scope(found.module, []))


def _body(definition: Definition) -> list[ast.stmt]:
    return definition.node.body if isinstance(definition.node, ast.ClassDef) else []
