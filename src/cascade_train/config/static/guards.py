"""The checks with which constructors begin, evaluated from their source: a wrong value is refused before any import.

A check is `if <condition>: raise ValueError(...)`, also in loops over what is known and in functions and methods that
the constructor calls. Nothing here runs code: the source is walked, and what may depend on anything but the arguments,
literals and a few pure functions is left to the constructor itself. Two rules keep a refusal from being a guess. A
statement of another kind than `_step` knows ends the walk of its function. An expression whose value is not known may
have done anything to what it names: to the object, and to lists and mappings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cascade_train.config.static.expressions import (
    SELF,
    UNKNOWN,
    Scope,
    UnknownError,
    Walk,
    evaluate,
    global_definition,
    is_constant,
    literal,
    stored,
)
from cascade_train.config.static.signatures import PLAIN_BASES
from cascade_train.config.static.static_source import Definition, lookup_expression

REFUSALS = {"ValueError", "ConfigError"}
DEEPEST = 8
"""Calls within calls that are walked."""
MAY_BE_SKIPPED = (ast.If, ast.For, ast.Raise, ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass)
"""Statements that do nothing but what `_touch` sees, whether or not they run."""


class Refused(Exception):  # noqa: N818 - what a guard says, and no error of this file
    """A guard refuses the arguments, with its message."""


class _Returned(Exception):  # noqa: N818 - control flow
    """A function returned."""


def refusal(chain: Sequence[Definition], given: Mapping[str, Any]) -> str | None:
    """Return what a constructor's checks say against its arguments; None = nothing that can be told here.

    Args:
        chain: a class and its bases, or a function alone.
        given: arguments by name; `UNKNOWN` for those whose value is not known, such as components.
    """
    first = chain[0]
    try:
        if isinstance(first.node, ast.FunctionDef):
            _call(first, Scope(Walk([]), first.module), [], given)
        else:
            _construct(chain, given)
    except Refused as refused:
        return str(refused)
    except Exception:  # noqa: BLE001 - whatever fails here is not known here; the constructor decides
        pass
    return None


def _construct(chain: Sequence[Definition], given: Mapping[str, Any]) -> None:
    """Walk the constructor, written or a dataclass's, of a class that nothing else has a hand in."""
    for definition, base in zip(chain, [*chain[1:], None], strict=True):
        node = definition.node
        assert isinstance(node, ast.ClassDef)
        bases = [ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in node.bases]
        decorated = len(node.decorator_list) != _is_dataclass(definition)
        if node.keywords or decorated or len(set(bases) - PLAIN_BASES) != (base is not None):
            raise UnknownError
    walk = Walk(chain)
    for definition in chain:
        walk.opaque |= {name for name, bound in _members(definition) if not _is_plain(bound, definition)}
    if walk.opaque & {"__new__", "__init_subclass__"}:
        raise UnknownError
    walk.escaped = bool(walk.opaque & {"__setattr__", "__getattribute__"})
    name, named = "__init__", given
    maker = next((d for d in chain if "__init__" in dict(_members(d)) or _is_dataclass(d)), None)
    if maker is not None and "__init__" not in dict(_members(maker)):
        walk.attributes = _field_defaults(chain) | dict(given)
        walk.escaped |= bool(walk.attributes.keys() & walk.opaque)
        name, named = "__post_init__", {}
    function, level = _method(walk, name, 0)
    assert isinstance(function.node, ast.FunctionDef)
    if name == "__post_init__" and len(list(ast.walk(function.node.args))) > 2:  # arguments but the object: InitVar
        raise UnknownError
    _call(function, Scope(walk, function.module, level=level), [SELF], named)


def _is_dataclass(definition: Definition) -> bool:
    """Return whether the first decorator is the standard library's, with a constructor."""
    for decorator in getattr(definition.node, "decorator_list", []):
        called = isinstance(decorator, ast.Call)
        found = lookup_expression(definition.module, decorator.func if called else decorator)
        keywords = {word.arg for word in decorator.keywords} if called else set()
        return found is not None and found.module.name == "dataclasses" and not keywords & {None, "init"}
    return False


def _members(definition: Definition) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a class binds, and how."""
    assert isinstance(definition.node, ast.ClassDef)
    for statement in definition.node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                yield from ((name, statement) for name in stored(statement))
            case ast.AnnAssign() | ast.Expr() | ast.Pass():
                pass
            case _:
                raise UnknownError


def _is_plain(statement: ast.stmt, definition: Definition) -> bool:
    """Return whether a class binds a value that no read or write of the attribute runs code of."""
    match statement:
        case ast.AnnAssign(value=ast.Call(func=ast.Name(id="field") | ast.Attribute(attr="field"))):
            return True
        case ast.AnnAssign(value=ast.Name() as constant):
            with suppress(Exception):
                return is_constant(evaluate(constant, Scope(Walk([]), definition.module)))
        case ast.Assign(value=ast.expr() as value) | ast.AnnAssign(value=ast.expr() as value):
            return not any(isinstance(each, ast.Name | ast.Call | ast.Lambda) for each in ast.walk(value))
    return False


def _field_defaults(chain: Sequence[Definition]) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields."""
    values: dict[str, Any] = {}
    for definition in reversed([each for each in chain if _is_dataclass(each)]):
        for name, statement in _members(definition):
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                values[name] = literal(statement.value)
    return values


def _method(walk: Walk, name: str, start: int) -> tuple[Definition, int]:
    """Return a method as the chain from `start` has it, and its level."""
    for level, definition in enumerate(walk.chain[start:], start):
        match [statement for member, statement in _members(definition) if member == name]:
            case [ast.FunctionDef() as only]:
                return Definition(definition.module, only), level
            case [] if name != "__init__" or not _is_dataclass(definition):
                continue
        break
    raise UnknownError


def _call(function: Definition, scope: Scope, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Walk a function's body under its arguments, in a new scope."""
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    makes_iterator = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    if node.decorator_list or makes_iterator or scope.depth > DEEPEST:
        raise UnknownError
    arguments = [*node.args.posonlyargs, *node.args.args]
    defaults: list[tuple[ast.arg, ast.expr | None]] = [*zip(arguments[::-1], node.args.defaults[::-1], strict=False)]
    defaults += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    known = {argument.arg for argument in [*arguments, *node.args.kwonlyargs]}
    scope.names = dict.fromkeys(stored(node), UNKNOWN)
    scope.names |= {each.arg: UNKNOWN for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    scope.names |= {argument.arg: literal(default) for argument, default in defaults}
    scope.names |= {argument.arg: value for argument, value in zip(arguments, positional, strict=False)}
    scope.names |= {name: value for name, value in named.items() if name in known}
    with suppress(_Returned):
        _run(node.body, scope)


def _run(body: Sequence[ast.stmt], scope: Scope) -> None:
    for statement in body:
        _step(statement, scope)


def _step(statement: ast.stmt, scope: Scope) -> None:
    match statement:
        case ast.If(test=test):
            value = _value(test, scope)
            _skip(statement, scope) if value is UNKNOWN else _run(statement.body if value else statement.orelse, scope)
        case ast.For(orelse=[]):
            _loop(statement, scope)
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message])) if name in REFUSALS:
            raise Refused(evaluate(message, scope))
        case ast.Return(value=result):
            _value(result or ast.Constant(None), scope)
            raise _Returned
        case ast.Assign(targets=[target], value=assigned):
            _assign(target, _value(assigned, scope), scope)
        case ast.Expr(value=expression):
            _value(expression, scope)
        case ast.Pass() | ast.AnnAssign(value=None):
            pass
        case _:
            raise UnknownError


def _loop(statement: ast.For, scope: Scope) -> None:
    values = _value(statement.iter, scope)
    if values is UNKNOWN:
        return _skip(statement, scope)
    for value in values:
        scope.walk.readable(values)
        _assign(statement.target, value, scope)
        _run(statement.body, scope)
    return None


def _skip(statement: ast.stmt, scope: Scope) -> None:
    """Pass over a statement that may run or not."""
    if not all(isinstance(each, MAY_BE_SKIPPED) for each in ast.walk(statement) if isinstance(each, ast.stmt)):
        raise UnknownError
    _touch(statement, scope)


def _assign(target: ast.expr, value: Any, scope: Scope) -> None:
    match target:
        case ast.Name(id=name):
            scope.names[name] = value
        case ast.Tuple(elts=parts) if value is not UNKNOWN:
            for part, each in zip(parts, value, strict=True):
                _assign(part, each, scope)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if (
            scope.names.get(name) is SELF and attribute not in scope.walk.opaque
        ):
            scope.walk.attributes[attribute] = value
        case _:
            _touch(target, scope)
            scope.walk.touched |= not is_constant(value)


def _value(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression, or `UNKNOWN`, after what it does."""
    with suppress(Exception):
        return evaluate(node, scope)
    try:
        if not isinstance(node, ast.Call):
            raise UnknownError
        _follow(node, scope)
    except Refused:
        raise
    except Exception:  # noqa: BLE001 - as in `refusal`
        _touch(node, scope)
    return UNKNOWN


def _touch(node: ast.AST, scope: Scope) -> None:
    """Forget what code that is not walked may change."""
    walk, fields = scope.walk, _own_fields(node, scope)
    objects = {id(each.value) for each in fields}
    for part in ast.walk(node):
        match part:
            case ast.NamedExpr():
                raise UnknownError
            case ast.Lambda() | ast.GeneratorExp():  # runs later
                walk.touched = True
            case ast.Name(id="super" | "locals" | "vars" | "eval" | "exec"):
                walk.escaped = walk.touched = True
            case ast.Name(id=name) if scope.names.get(name) is SELF and id(part) not in objects:
                walk.escaped = walk.touched = True
            case ast.Name(id=name):
                walk.touched |= not is_constant(scope.names.get(name))
    for each in fields:
        walk.touched |= not is_constant(walk.attributes.get(each.attr))
        if not isinstance(each.ctx, ast.Load):
            walk.attributes[each.attr] = UNKNOWN
    scope.names |= dict.fromkeys(stored(node), UNKNOWN)


def _own_fields(node: ast.AST, scope: Scope) -> list[ast.Attribute]:
    """Return the reads and writes of the object's attributes that run no code of its class."""
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and scope.names.get(each.value.id) is SELF
        and each.attr not in scope.walk.opaque
        and not each.attr.startswith("__")
    ]


def _follow(call: ast.Call, scope: Scope) -> None:
    """Walk a call of a function, a method of the class, or one of its bases."""
    walk, level, first = scope.walk, scope.level, [SELF]
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        raise UnknownError
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=name):
            function, level = _method(walk, name, scope.level + 1)
        case ast.Attribute(value=ast.Name(id=own), attr=name) if (
            scope.names.get(own) is SELF and not walk.escaped and name not in walk.attributes
        ):
            function, level = _method(walk, name, 0)
        case ast.Name():
            function, level, first = global_definition(call.func, scope), len(walk.chain), []
        case _:
            raise UnknownError
    positional = [*first, *(_value(each, scope) for each in call.args)]
    named = {str(word.arg): _value(word.value, scope) for word in call.keywords}
    _call(function, Scope(walk, function.module, level=level, depth=scope.depth + 1), positional, named)
