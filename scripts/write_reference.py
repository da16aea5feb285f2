"""The tables of keys, groups and commands, made of conf/ and docstrings when `make docs` builds the site.

A page has a line `<!-- NAME: generated -->` where a table goes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf

from cascade_train.commands.parts.command_line import ALIASES, Command
from cascade_train.config.groups import commands
from cascade_train.config.help import attribute_docs, meaning_of
from cascade_train.config.schema import Root

ROOT = Path(__file__).resolve().parents[1]
CONF, CONFIG = ROOT / "conf", ROOT / "src/cascade_train/config"
SCHEMAS = (CONFIG / "schema.py", CONFIG / "schema_outputs.py")
CHOSEN = {"parallel": "auto", "memory": "none", "tracker": "none"}
"""Typed groups, whose values lie in the option that is chosen by default."""


COMPONENTS = {
    **{group: group for group in ("task", "data", "model", "objective")},
    **{"optimizer": "optimizer", "lr_scheduler": "lr_scheduler", "filter": "task.filter"},
}
"""Groups whose options name a class, and where their keys stand."""


def options(group: str) -> dict[str, str]:
    """Return each option of a group and the first line of its file, which says what it is."""
    files = sorted(path for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))
    lines = {path.stem: path.read_text().splitlines() for path in files}
    return {name: next(line for line in text if not line.startswith("# @"))[2:] for name, text in lines.items()}


def group_names() -> list[str]:
    """Return the groups of the defaults list, in its order, with those that a task or an objective has inside."""
    listed = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    names = [name.split("@")[0] for entry in listed if isinstance(entry, dict) for name in entry]
    return [name for name in ("model", "task", *names, "filter") if (CONF / name).is_dir()]


def groups() -> Iterator[str]:
    """Yield the table of groups and their options."""
    yield "| Group | Option | Meaning |"
    yield "|---|---|---|"
    for group in dict.fromkeys(group_names()):
        for name, text in options(group).items():
            yield f"| `{group}` | `{name}` | {_cell(text)} |"


def explained() -> dict[str, dict[str, str]]:
    """Return what each field of each class of the schema is, from the text below it; a field without one is a node."""
    found: dict[str, dict[str, str]] = {}
    for path in SCHEMAS:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = dict(_fields(node))
    return found


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            said = text.value if isinstance(text, ast.Constant) else f"-> {ast.unparse(field.annotation)}"
            yield field.target.id, str(said)


def keys() -> Iterator[str]:
    """Yield the table of the loop's keys, with their defaults."""
    classes, values = explained(), yaml.safe_load((CONF / "config.yaml").read_text())
    for group, name in CHOSEN.items():
        typed = dataclasses.fields(get_type_hints(Root)[group])
        own = {field.name: field.default for field in typed if field.default is not dataclasses.MISSING}
        values[group] = own | yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    yield "| Key | Default | Meaning |"
    yield "|---|---|---|"
    for name, text in classes["Root"].items():
        node = classes.get(text.removeprefix("-> "))
        if node is not None:
            yield from (_row(f"{name}.{key}", values[name].get(key), said) for key, said in node.items())
        elif not text.startswith("-> "):
            yield _row(name, values[name], text)


def _row(key: str, value: Any, text: str) -> str:
    shown = str(value) if isinstance(value, str) else json.dumps(value)
    return f"| `{key}` | `{shown}` | {_cell(text)} |"


def _cell(text: str) -> str:
    plain = re.sub("`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text)
    return " ".join(plain.replace("|", "\\|").split()).rstrip(".")


def command_list() -> Iterator[str]:
    """Yield the table of commands."""
    yield "| Command | Does |"
    yield "|---|---|"
    yield from (f"| `cascade-train {name}` | {_cell(text)} |" for name, text in commands().items())


def command_options() -> Iterator[str]:
    """Yield a section for each command: its actions, with their options. `train` has none: Hydra composes its keys."""
    for name in commands():
        declared = getattr(importlib.import_module(f"cascade_train.commands.{name}"), "COMMAND", {})
        actions = {"": declared} if isinstance(declared, Command) else declared
        yield from ("", f"## {name}") if actions else ()
        for command in actions.values():
            meaning = _cell(command.arguments.__doc__ or "")
            yield from ("", f"`cascade-train {name} {command.usage or 'key=value …'}`", "", f"{meaning}.", "")
            yield "| Option | Default | Meaning |"
            yield "|---|---|---|"
            yield from _option_rows(command.arguments)
            if command.run_defaults is not None:
                yield from ("", "All other arguments are [those of a training](config.md).")
    yield ""


def _option_rows(arguments: type) -> Iterator[str]:
    typed = {field: alias for alias, field in ALIASES.items()}
    docs = attribute_docs(arguments)
    for field in dataclasses.fields(arguments):
        made = field.default_factory
        value = field.default if made is dataclasses.MISSING else made()
        missing = value in (dataclasses.MISSING, MISSING)
        default = "must be given" if missing else f"`{json.dumps(value, ensure_ascii=False).strip(chr(34))}`"
        yield f"| `{typed.get(field.name, field.name)}` | {default} | {_cell(docs.get(field.name, ''))} |"


def components() -> Iterator[str]:
    """Yield a section for each group of components, with the keys of each option; those of every source come first."""
    base = yaml.safe_load((CONF / "data/_base.yaml").read_text())
    for group, place in COMPONENTS.items():
        yield from ("", f"## {group}")
        if group == "data":
            whole = {"_target_": _inherited(group, "webdataset")["_target_"], **base}
            yield from _component("Every source", place, base, whole)
        for name, text in options(group).items():
            whole = _inherited(group, name)
            node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) if group == "data" else whole
            yield from _component(f"`{group}={name}`: {_cell(text)}", place, node, whole)
    yield ""


def _inherited(group: str, name: str) -> dict[str, Any]:
    """Return what a file of a group holds, with what it has from others of its folder."""
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    parents = [
        each for each in node.pop("defaults", ()) if isinstance(each, str) and each != "_self_" and "@" not in each
    ]
    merged = OmegaConf.merge(*(_inherited(group, parent) for parent in parents), node)
    return {str(key): value for key, value in OmegaConf.to_container(merged, resolve=False).items()}


def _component(title: str, place: str, node: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of `node`; what they are is looked up in the `whole` component."""
    cfg: Any = whole
    for part in reversed(place.split(".")):
        cfg = {part: cfg}
    rows = [_row(key, value, meaning_of(key, cfg)) for key, value in _leaves(place, node)]
    yield from ("", f"{title}.", "", *(["| Key | Default | Meaning |", "|---|---|---|", *rows] if rows else ()))


def _leaves(place: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if name == "network" or (name in ("_target_", "_partial_", "defaults") and value != "???"):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{place}.{name}", value)
        else:
            yield f"{place}.{name}", value


PAGES = {
    "keys.md": {"components": components},
    "commands.md": {"commands": command_list, "options": command_options},
    "config.md": {"groups": groups, "keys": keys},
}
"""By page, its generated tables, each for a line `<!-- NAME: generated -->`."""


def with_tables(page: str, text: str) -> str:
    """A page's text with its generated tables in the place of their marks."""
    for name, lines in PAGES.get(page, {}).items():
        mark = f"<!-- {name}: generated -->"
        if mark not in text:
            raise ValueError(f"docs/{page} has no line {mark}")
        text = text.replace(mark, "\n".join(lines()))
    return text
