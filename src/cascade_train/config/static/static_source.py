"""Find classes and functions in source files by their dotted path, without importing them.

Reading and name resolution only; what a signature is lives in static/signatures.py.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cascade_train.errors import ConfigError


class UnreadableError(Exception):
    """The source alone cannot tell; build binds the arguments after import instead."""


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted path.
        is_package: whether relative imports start at the module itself.
        names: top-level name -> the statement that binds it last.
        stars: modules of `from … import *`.
    """

    name: str
    is_package: bool
    names: Mapping[str, ast.stmt]
    stars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Definition:
    """A statement and the module whose names it uses.

    Attributes:
        module: where it stands.
        node: class, function or assignment; None = the module itself.
        owner: the class that holds it, for methods.
    """

    module: Module
    node: ast.stmt | None
    owner: ast.ClassDef | None = field(default=None)


def find(target: str) -> Definition:
    """Return what a dotted path names, following re-exports.

    Raises:
        ConfigError: it names nothing.
        UnreadableError: the source alone cannot tell.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = load_module(".".join(parts[:length]))
        if module is not None:
            return _descend(module, parts[length:], target)
    raise ConfigError(
        f"{target!r} names nothing: there is no module or package {parts[0]!r} where Python looks for one, such as the "
        f"current folder, {Path.cwd()}. Start the command in the folder that holds it, or add that to PYTHONPATH."
    )


def _descend(module: Module, names: list[str], target: str) -> Definition:
    definition = lookup(module, names[0])
    if definition is None:
        if "__getattr__" in module.names or module.stars:
            raise UnreadableError(f"{target}: {module.name} makes its names at import.")
        near = difflib.get_close_matches(names[0], module.names, n=1)
        hint = f" Did you mean {module.name}.{near[0]}?" if near else ""
        raise ConfigError(f"{target!r} names nothing: {module.name} has no {names[0]!r}.{hint}")
    for name in names[1:]:
        definition = _member(definition, name, target)
    return definition


def _member(definition: Definition, name: str, target: str) -> Definition:
    if isinstance(definition.node, ast.ClassDef):
        for statement in definition.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return Definition(definition.module, statement, definition.node)
    if definition.node is None:
        found = lookup(definition.module, name)
        if found is not None:
            return found
    raise UnreadableError(f"{target}: {name!r} is not in the source of its parent.")


def lookup(module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
    """Return the definition behind `name` in `module`, following imports and plain renamings; None = not found."""
    key = (module.name, name)
    if key in seen:
        return None
    seen |= {key}
    statement = module.names.get(name)
    if statement is None:
        return _lookup_elsewhere(module, name, seen)
    if isinstance(statement, ast.ImportFrom):
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        return _lookup_import(absolute(module, statement), original, seen)
    if isinstance(statement, ast.Import):
        imported = next(a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name)
        other = load_module(imported.name if imported.asname else name)
        return None if other is None else Definition(other, None)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        return lookup(module, statement.value.id, seen) or Definition(module, statement)
    return Definition(module, statement)


def _lookup_elsewhere(module: Module, name: str, seen: frozenset[tuple[str, str]]) -> Definition | None:
    for star in module.stars:
        found = _lookup_import(star, name, seen)
        if found is not None:
            return found
    submodule = load_module(f"{module.name}.{name}") if module.is_package else None
    return None if submodule is None else Definition(submodule, None)


def _lookup_import(module_name: str, name: str, seen: frozenset[tuple[str, str]]) -> Definition | None:
    module = load_module(module_name)
    return None if module is None else lookup(module, name, seen)


def lookup_expression(module: Module, expression: ast.expr) -> Definition | None:
    """Return the definition behind `Name` or `package.Name` in `module`; None = not found."""
    if isinstance(expression, ast.Name):
        return lookup(module, expression.id)
    if isinstance(expression, ast.Attribute):
        parent = lookup_expression(module, expression.value)
        if parent is not None and parent.node is None:
            return lookup(parent.module, expression.attr)
    return None


def absolute(module: Module, statement: ast.ImportFrom) -> str:
    """Return the absolute name of the module that a `from … import` reads."""
    if not statement.level:
        return statement.module or ""
    parts = module.name.split(".")
    drop = statement.level - 1 if module.is_package else statement.level
    base = parts[: len(parts) - drop]
    return ".".join([*base, statement.module] if statement.module else base)


@functools.cache
def load_module(name: str) -> Module | None:
    """Read a module's source; None where there is no such module or no source."""
    path = module_file(name)
    if path is None:
        return None
    if path.is_dir():
        return Module(name, True, {})
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ConfigError(f"{name!r} cannot be read: {path}, line {error.lineno}: {error.msg}.") from error
    module = Module(name, path.name == "__init__.py", dict(bindings(tree.body)))
    stars = [s for s in _statements(tree.body) if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
    return Module(name, module.is_package, module.names, tuple(absolute(module, s) for s in stars))


def module_file(name: str) -> Path | None:
    """Return the source file of a module (the folder of a namespace package), importing nothing."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, e.g. __main__
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for place in spec.submodule_search_locations or ():
        folder = Path(place).joinpath(*rest)
        for candidate in (folder / "__init__.py", folder.with_suffix(".py"), folder):
            if candidate.is_file() or (candidate is folder and folder.is_dir()):
                return candidate
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements that run at import, also those under `if` and `try`."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(statement, block, []))


def bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that statements bind, each with the statement."""
    for statement in _statements(body):
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield statement.name, statement
            case ast.ImportFrom() | ast.Import():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0], statement
            case ast.Assign():
                yield from ((t.id, statement) for t in statement.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement
