"""Constructor signatures, class constants and argument docs, read from source without importing the target.

Which value fits which annotation lives in static/annotations.py, the walk over the configuration in components.py.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cascade_train.config.static.static_source import (
    Definition,
    Module,
    UnreadableError,
    bindings,
    find,
    lookup_expression,
    module_file,
)
from cascade_train.errors import ConfigError

ROLES = frozenset({"Free", "Order", "File"})
"""Markers of cascade_train/options.py."""

PLAIN_BASES = frozenset({"object", "Generic", "Protocol", "ABC"})
"""Bases that bring no constructor of their own."""


@dataclass(frozen=True)
class Parameter:
    """One argument of a constructor.

    Attributes:
        annotation: its type as written, without markers of its roles; None = not annotated.
        required: whether it has no default.
        module: where the annotation's names are looked up.
        roles: names of the markers of cascade_train/options.py around its type.
    """

    annotation: ast.expr | None
    required: bool
    module: Module
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Signature:
    """The arguments that a target takes by name.

    Attributes:
        parameters: name -> argument, in order.
        accepts_any: whether it has **kwargs.
    """

    parameters: Mapping[str, Parameter]
    accepts_any: bool


@functools.cache
def read_signature(target: str) -> Signature:
    """Return the signature of the class or function that a dotted path names.

    Raises:
        ConfigError: it names nothing.
        UnreadableError: the source alone cannot tell.
    """
    definition = find(target)
    if isinstance(definition.node, ast.ClassDef):
        return _constructor(definition)
    if isinstance(definition.node, ast.FunctionDef):
        decorators = {ast.unparse(d) for d in definition.node.decorator_list}
        bound = definition.owner is not None and "staticmethod" not in decorators
        return _function(definition.node, definition.module, skip_first=bound)
    raise UnreadableError(f"{target} is neither a class nor a function in its source.")


def definition_chain(target: str) -> list[Definition]:
    """Return a class and its bases, as far as the source tells, or a function alone.

    Raises:
        ConfigError: the target names nothing.
        UnreadableError: the source alone cannot tell.
    """
    found = find(target)
    chain: list[Definition] = []
    with suppress(UnreadableError):
        chain.extend(class_chain(found))
    return chain


def class_constant(target: str, name: str) -> Any:
    """Return the literal that a class or the nearest of its bases assigns to `name`.

    Raises:
        ConfigError: the target names nothing.
        UnreadableError: no class of the chain assigns a literal.
    """
    for definition in class_chain(find(target)):
        for statement in _class_body(definition):
            if name in _assigned(statement) and statement.value is not None:  # type: ignore[attr-defined]
                return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
    raise UnreadableError(f"{target} has no literal {name!r}.")


def argument_doc(target: str, name: str) -> str:
    """Return what the docstrings of a target and its bases say of one argument; empty where they say nothing."""
    try:
        for definition in class_chain(find(target)):
            for node in [definition.node, *_class_body(definition)]:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := _entry(node, name)):
                    return text
    except (ConfigError, UnreadableError):
        pass
    return ""


def _entry(node: ast.ClassDef | ast.FunctionDef, name: str) -> str:
    """Return the entry of a docstring's list on one name; empty where there is none."""
    entry = rf"^ +{name}: (.+?)(?=\n *\w+: |\n\n|\n *$|\Z)"
    found = re.search(entry, ast.get_docstring(node) or "", re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the string below each field of an imported dataclass, by field, inherited fields included."""
    docs = {}
    for definition in reversed(list(class_chain(find(f"{cls.__module__}.{cls.__qualname__}")))):
        body = _class_body(definition)
        for statement, after in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


def class_chain(definition: Definition) -> Iterator[Definition]:
    """Yield a class and its bases, depth first.

    Raises:
        UnreadableError: a base is not a class in some source.
    """
    yield definition
    for base in getattr(definition.node, "bases", []):
        expression = base.value if isinstance(base, ast.Subscript) else base
        if ast.unparse(expression).rpartition(".")[2] in PLAIN_BASES:
            continue
        parent = lookup_expression(definition.module, expression)
        if parent is None or not isinstance(parent.node, ast.ClassDef):
            raise UnreadableError(f"The base {ast.unparse(base)} has no source.")
        yield from class_chain(parent)


def is_subclass(definition: Definition, parent: ast.ClassDef) -> bool:
    """Return whether a class has `parent` among its bases, or is it; True where the source cannot tell."""
    try:
        return any(c.node is parent for c in class_chain(definition))
    except UnreadableError:
        return True


def inherits(definition: Definition, base: str) -> bool:
    """Return whether a class has the one of this dotted path among its bases; False where the source cannot tell."""
    with suppress(UnreadableError):
        return find(base).node in [each.node for each in class_chain(definition)]
    return False


def import_target(target: str, *, path: str) -> Any:
    """Import what a dotted path names, for the component at a path of the configuration; else raise a ConfigError."""
    parts = target.split(".")
    length = next((n for n in range(len(parts) - 1, 0, -1) if module_file(".".join(parts[:n]))), 1)
    try:
        return functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path}._target_={target} cannot be imported: {error}.") from error


def bind_imported(target: str, given: Iterable[str], *, path: str, partial: bool) -> None:
    """Import a target and check the names of its arguments, for what the source alone cannot tell.

    Raises:
        ConfigError: it does not exist, or an argument is unknown, or missing where `partial` does not allow it.
    """
    made = import_target(target, path=path)
    try:
        signature = inspect.signature(made)
    except ValueError:  # written in C
        return
    try:
        (signature.bind_partial if partial else signature.bind)(**dict.fromkeys(given))
    except TypeError as error:
        raise ConfigError(f"{path} does not fit {target}: {error}.") from error


def _constructor(definition: Definition) -> Signature:
    for current in class_chain(definition):
        for statement in _class_body(current):
            if isinstance(statement, ast.FunctionDef) and statement.name in {"__init__", "__new__"}:
                return _function(statement, current.module, skip_first=True)
        if is_dataclass(current):
            return Signature(_dataclass_fields(current), accepts_any=False)
    return Signature({}, accepts_any=False)


def _function(node: ast.FunctionDef, module: Module, *, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*missing, *arguments.defaults], strict=True)][skip_first:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = {a.arg: _parameter(a.annotation, default is None, module) for a, default in pairs}
    return Signature(parameters, accepts_any=arguments.kwarg is not None)


def _parameter(annotation: ast.expr | None, required: bool, module: Module) -> Parameter:
    roles = set[str]()
    while isinstance(annotation, ast.Subscript) and (role := ast.unparse(annotation.value)) in ROLES:
        roles.add(role)
        annotation = annotation.slice
    return Parameter(annotation, required, module, frozenset(roles))


def _dataclass_fields(definition: Definition) -> dict[str, Parameter]:
    fields: dict[str, Parameter] = {}
    for current in reversed([c for c in class_chain(definition) if is_dataclass(c)]):
        for statement in _class_body(current):
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                options = _field_options(statement.value)
                if options.get("init") != "False":
                    required = statement.value is None or (bool(options) and not options.keys() & FIELD_DEFAULTS)
                    fields[ast.unparse(statement.target)] = _parameter(statement.annotation, required, current.module)
    return fields


FIELD_DEFAULTS = {"default", "default_factory"}


def _field_options(value: ast.expr | None) -> dict[str, str]:
    """Return the keywords of `field(…)`, as written; empty where the value is no such call."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        return {"field": "", **{k.arg: ast.unparse(k.value) for k in value.keywords if k.arg}}
    return {}


def is_dataclass(definition: Definition) -> bool:
    """Return whether a class is decorated as a dataclass."""
    decorators = getattr(definition.node, "decorator_list", [])
    names = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in decorators}
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def class_members(definition: Definition) -> Iterator[tuple[str, bool]]:
    """Yield the names in a class's body, each with whether it is left to those that inherit: abstract or unassigned."""
    for statement in _class_body(definition):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                decorators = {ast.unparse(each).rpartition(".")[2] for each in statement.decorator_list}
                yield statement.name, "abstractmethod" in decorators
            case ast.AnnAssign(target=ast.Name(id=name), value=None):
                if "ClassVar" in ast.unparse(statement.annotation):
                    yield name, True
            case _:
                yield from ((name, False) for name, _ in bindings([statement]))


def _class_body(definition: Definition) -> list[ast.stmt]:
    return definition.node.body if isinstance(definition.node, ast.ClassDef) else []


def _assigned(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign():
            return [ast.unparse(t) for t in statement.targets]
        case ast.AnnAssign():
            return [ast.unparse(statement.target)]
    return []
