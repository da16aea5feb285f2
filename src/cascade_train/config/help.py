"""The text of `--help`, and what a key means, by docstrings in source files or comments in `conf/`.

No component is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.arguments import HYDRA_KEYS
from cascade_train.config.groups import commands, conf_dir, group_options, groups
from cascade_train.config.schema import Root

WIDTH, INDENT = 120, 42

FIRST = {
    "task=lora": "what trains; or a recipe with all its settings: experiment=finetune_c_3b_lora",
    "model=c_3b": "which stage, and how large; names ending in _tiny train on a laptop",
    "data.path=pictures": "a folder of pictures with captions beside them (.txt), a .csv or a .parquet; "
    "for tar files in the webdataset layout: data.urls='\"a-{00..05}.tar\"'",
    "run.name=mine": "the run is written to runs/mine; the same command continues it",
    "train.max_steps=2000": "optimizer steps",
    "train.global_batch_size=16": "samples of a step, over all ranks",
    "train.micro_batch_size=1": "samples that one rank holds at once: lower it when memory runs out",
    "optimizer.lr=1e-4": "learning rate",
}
"""What a first run sets, as typed -> meaning."""

HEAD = "Train any part of Stable Cascade: cascade-train group=option ... key=value ... (or torchrun -m cascade_train)"
FOOT = """Quote values with braces, spaces or symbols: 'data.urls="a-{000..005}.tar"'.
--cfg job prints the composed configuration, --info defaults shows where it comes from, --multirun a=1,2 sweeps.
"""


def help_text(cfg: DictConfig) -> str:
    """Return the help for a composed configuration, whose components show the keys of the options chosen."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    options = {f"{group}=": ", ".join(group_options(group)) for group in groups()}
    keys = {f"{key}={shown(value)}": meaning_of(key, plain) for key, value in _leaves(plain)}
    parts = {
        "Set first": FIRST,
        "Commands (cascade-train <command> key=value ...; <command> --help lists its keys)": commands(),
        "Groups (group=option)": options,
        "Keys (key=value) of the options chosen": keys,
    }
    return "\n\n".join([HEAD, *(f"== {title} ==\n{table(rows)}" for title, rows in parts.items()), FOOT])


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that may be set, typed nodes before components, as the root lists them."""
    for key, value in sorted(node.items(), key=lambda pair: "_target_" in pair[1] if isinstance(pair[1], dict) else 0):
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key not in HYDRA_KEYS:
            yield f"{prefix}{key}", value


def table(rows: Mapping[str, str]) -> str:
    """Return names and their meanings in two columns."""
    lines, pad = list[str](), " " * INDENT
    for name, meaning in rows.items():
        begin = f"  {name}".ljust(INDENT) if len(name) < INDENT - 3 else f"  {name}\n{pad}"
        text = textwrap.fill(meaning, WIDTH, initial_indent=pad, subsequent_indent=pad)
        lines.append(f"{begin}{text.lstrip()}".rstrip())
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Return a value as it is typed."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "{}" if value == {} else str(value)


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
    for name in rest:
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations or [])
    file = Path(spec.origin) if spec and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None
