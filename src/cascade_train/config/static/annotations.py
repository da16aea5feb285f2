"""Whether a configured value fits an annotation, read from source. In doubt it fits: build finds the rest."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from cascade_train.config.static.signatures import is_subclass
from cascade_train.config.static.static_source import Definition, Module, UnreadableError, find, lookup_expression
from cascade_train.errors import ConfigError

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
"""Keys of a component that are none of its arguments."""

SCALARS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "Path": (str,),
    "PathLike": (str,),
    "bytes": (bytes,),
}
SEQUENCES = {"list", "List", "Sequence", "Iterable", "Collection", "set", "Set", "frozenset"}
TUPLES = {"tuple", "Tuple"}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping"}
ANYTHING = {"Any", "object", "type", "Type"}
OPEN_BASES = {
    "Enum",
    "StrEnum",
    "IntEnum",
    "TypedDict",
    "NamedTuple",
    "NewType",
    "str",
    "int",
    "float",
    "dict",
    "tuple",
}
"""Bases of classes that stand for plain values too."""


def fits(value: Any, annotation: ast.expr | None, module: Module) -> bool:
    """Return whether a value, as read from YAML, fits an annotation written in `module`."""
    match annotation:
        case None:
            return True
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return fits(value, ast.parse(text, mode="eval").body, module)
        case ast.BinOp(op=ast.BitOr()):
            return fits(value, annotation.left, module) or fits(value, annotation.right, module)
        case ast.Subscript():
            return _fits_subscript(value, annotation, module)
        case ast.Name() | ast.Attribute():
            return _fits_name(value, annotation, module)
    return True


def needs_component(annotation: ast.expr | None, module: Module) -> bool:
    """Return whether an annotation is for objects: a component or null fits, a text and a number do not."""
    plain_values: tuple[Any, ...] = ("text", 0, 0.5, True, [])
    return not literals(annotation) and not any(fits(value, annotation, module) for value in plain_values)


def literals(annotation: ast.expr | None) -> list[Any]:
    """Return the values that every `Literal[…]` in an annotation lists, in order; empty where there is none."""
    found = [n for n in ast.walk(annotation) if isinstance(n, ast.Subscript)] if annotation is not None else []
    lists = [n.slice for n in found if ast.unparse(n.value).rpartition(".")[2] == "Literal"]
    items = [item for each in lists for item in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return [item.value for item in items if isinstance(item, ast.Constant)]


def _fits_subscript(value: Any, annotation: ast.Subscript, module: Module) -> bool:
    name = ast.unparse(annotation.value).rpartition(".")[2]
    inner = annotation.slice
    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if is_component(value) and name not in {"Optional", "Union", "Annotated"}:
        return True
    match name:
        case "Optional":
            return value is None or fits(value, inner, module)
        case "Union":
            return any(fits(value, item, module) for item in items)
        case "Literal":
            return any(_same(value, item) for item in items)
        case "Annotated" | "Final":
            return fits(value, items[0], module)
        case _ if name in SEQUENCES:
            return _is_list(value) and all(fits(v, inner, module) for v in value)
        case _ if name in TUPLES:
            return _fits_tuple(value, items, module)
        case _ if name in MAPPINGS:
            return isinstance(value, Mapping) and all(fits(v, items[-1], module) for v in value.values())
        case "Callable":
            return False
    return True


def _fits_tuple(value: Any, items: list[ast.expr], module: Module) -> bool:
    if not _is_list(value):
        return False
    if len(items) == 2 and isinstance(items[1], ast.Constant) and items[1].value is Ellipsis:
        return all(fits(v, items[0], module) for v in value)
    return len(value) == len(items) and all(fits(v, item, module) for v, item in zip(value, items, strict=True))


def _fits_name(value: Any, annotation: ast.expr, module: Module) -> bool:
    name = ast.unparse(annotation).rpartition(".")[2]
    if name in ANYTHING or (is_component(value) and name in SCALARS):
        return True
    if name in SCALARS:
        return isinstance(value, SCALARS[name]) and isinstance(value, bool) == (name == "bool")
    if name in SEQUENCES | TUPLES:
        return _is_list(value)
    if name in MAPPINGS:
        return isinstance(value, Mapping)
    if name == "Callable":
        return is_component(value)
    definition = lookup_expression(module, annotation)
    return definition is None or _fits_definition(value, definition)


def _fits_definition(value: Any, definition: Definition) -> bool:
    node = definition.node
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return fits(value, _alias(node), definition.module)
    if not isinstance(node, ast.ClassDef):
        return True
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    if bases & OPEN_BASES:
        return True
    return is_component(value) and ("Protocol" in bases or _makes(value, node))


def _makes(component: Mapping[str, Any], parent: ast.ClassDef) -> bool:
    """Return whether a component's class is `parent` or one of its subclasses; True where it cannot be told."""
    if component.get("_partial_"):
        return True
    try:
        made = find(str(component["_target_"]))
    except (ConfigError, UnreadableError):
        return True
    return not isinstance(made.node, ast.ClassDef) or is_subclass(made, parent)


def _alias(node: ast.Assign | ast.AnnAssign) -> ast.expr | None:
    """Return the type behind `Name = …`; None where it is not written as a type."""
    return None if isinstance(node.value, ast.Call | ast.Constant) else node.value


def is_component(value: Any) -> bool:
    """Return whether a value names a `_target_`."""
    return isinstance(value, Mapping) and "_target_" in value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _same(value: Any, item: ast.expr) -> bool:
    """Return whether a value is the one that `Literal[item]` names; True for an enum's member."""
    try:
        literal = ast.literal_eval(item)
    except ValueError:
        return True
    return type(value) is type(literal) and bool(value == literal)
