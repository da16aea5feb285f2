"""What a key means, by docstrings in source files or comments in `conf/`.

No component is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from cascade_train.config.groups import conf_dir
from cascade_train.config.schema import Root


def meaning_of(path: str, cfg: Mapping[str, Any]) -> str:
    """Return what the schema, or the constructor of the component above it, says of a key of a plain configuration."""
    parent_path, _, name = path.rpartition(".")
    if name == "_target_":
        return "the dotted path of a class, e.g. torch.optim.SGD"
    typed = get_type_hints(Root).get(parent_path, Root if not parent_path else None)
    if dataclasses.is_dataclass(typed):
        return attribute_docs(typed).get(name, "")  # type: ignore[arg-type]
    parent: Any = cfg
    for part in filter(None, parent_path.split(".")):
        parent = parent.get(part) if isinstance(parent, Mapping) else None
    target = parent.get("_target_") if isinstance(parent, Mapping) else None
    return argument_doc(target, name) if isinstance(target, str) and target != "???" else ""


def argument_doc(target: str, name: str) -> str:
    """Return one argument's text in the docstrings of a class and its bases, or of a function, else in `conf/`."""
    entry = re.compile(rf"^ +{name}: (.+?)(?=\n *\w+: |\n\n|\n *$|\Z)", re.MULTILINE | re.DOTALL)
    for definition in _definitions(target):
        for node in [definition, *definition.body]:
            text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
            if found := entry.search(text or ""):
                return " ".join(found[1].split())
    return key_comments().get((target, name), "")


@functools.cache
def key_comments() -> dict[tuple[str, str], str]:
    """Return the comments of `conf/` on components' keys, by `_target_` and key; those of siblings serve a file too."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(conf_dir().rglob("*.yaml")):
        comments, targets = _comments_and_targets(path)
        for (node, key), text in comments.items():
            if node in targets:
                found.setdefault((targets[node], key), text)
    return found


def _comments_and_targets(path: Path) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """Return the comment behind each key of a file, by its node's path, and the `_target_` of each node.

    Those of the files of its group that its defaults name are among them.
    """
    comments, targets, above = dict[tuple[str, str], str](), dict[str, str](), list[tuple[int, str]]()
    for line in path.read_text().splitlines():
        if (named := re.fullmatch(r"  - (\w+)", line)) and (sibling := path.with_stem(named[1])).is_file():
            inherited = _comments_and_targets(sibling)
            comments, targets = comments | inherited[0], targets | inherited[1]
        if found := re.match(r"( *)(\w+):(?: (\S+))?(?:.*? # (.*))?", line):
            above = [(indent, key) for indent, key in above if indent < len(found[1])]
            node = ".".join(key for _, key in above)
            above.append((len(found[1]), found[2]))
            if found[2] == "_target_":
                targets[node] = found[3]
            elif found[4]:
                comments[node, found[2]] = found[4]
    return comments, targets


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the string below each field of an imported dataclass, by field, inherited fields included."""
    docs = {}
    for definition in reversed(list(_definitions(f"{cls.__module__}.{cls.__qualname__}"))):
        for statement, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


def _definitions(target: str, seen: frozenset[str] = frozenset()) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield the class or function of a dotted path, as its file has it, then its bases; imports are followed."""
    module, _, name = target.rpartition(".")
    found, seen = None if target in seen else _names(module).get(name), seen | {target}
    if isinstance(found, str):
        yield from _definitions(found, seen)
    elif found is not None:
        yield found
        for base in getattr(found, "bases", ()):
            first, dot, rest = ast.unparse(base).partition("[")[0].partition(".")
            imported = _names(module).get(first)
            place = imported if isinstance(imported, str) else f"{module}.{first}"
            yield from _definitions(f"{place}{dot}{rest}", seen)


@functools.cache
def _names(module: str) -> Mapping[str, ast.ClassDef | ast.FunctionDef | str]:
    """Return the classes and functions of a module's file by name, and the dotted paths of what it imports."""
    file = _file(module)
    if file is None:
        return {}
    names: dict[str, ast.ClassDef | ast.FunctionDef | str] = {}
    try:
        statements = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names |= {alias.asname or alias.name: f"{statement.module}.{alias.name}" for alias in statement.names}
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names[statement.name] = statement
    return names


def _file(module: str) -> Path | None:
    """Return a module's source file; None where there is none."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, e.g. __main__, or no name
        return None
    if spec is None:
        return None
    folders = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    alone = [Path(spec.origin)] if spec.origin and not rest else []
    return next((file for file in [*files, *alone] if file.suffix == ".py" and file.is_file()), None)
