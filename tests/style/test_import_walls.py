"""Imports point down: commands -> results -> assembly -> engine -> tasks.base; tasks -> diffusion, models, filters."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter

import pytest

from tests.style.source import PACKAGE, SourceFile, in_rooms, library

BELOW = {"config", "engine", "distributed", "tasks", "diffusion", "models", "filters", "data"}
"""Rooms that know nothing of how a run is put together."""

# What each room may import of the library. `batch`, `errors`, `files`, `options`, `redaction` and
# `signals` are open to all.
INSIDE = {
    "__main__": {"commands", "assembly", "config"},
    "commands": {"commands", "results", "assembly", *BELOW},
    "results": {"results", "assembly", *BELOW},
    "assembly": {"assembly", *BELOW},
    "config": {"config"},
    "engine": {"engine", "distributed", "tasks.base"},
    "distributed": {"distributed"},
    "tasks": {"tasks", "diffusion", "models", "filters"},
    "filters": {"filters"},
    "models": {"models"},
    "data": {"data"},
    "diffusion": {"diffusion"},
    "batch": set(),
    "errors": set(),
    "files": {"files"},
    "options": set(),
    "redaction": set(),
    "signals": set(),
}
GROUND = {"batch", "errors", "files", "options", "redaction", "signals"}

# What each room may import from elsewhere, beside the standard library.
OUTSIDE = {
    "diffusion": {"torch"},
    "tasks": {"torch"},
    "distributed": {"torch"},
    "batch": {"torch", "numpy"},
    "errors": set(),
    "files": {"yaml", "huggingface_hub"},
    "options": {"regex"},
    "redaction": set(),
    "signals": set(),
    "config": {"hydra", "omegaconf", "yaml"},
}

# Libraries that live in few rooms.
HOME = {
    "diffusers": {"models"},
    "transformers": {"models"},
    "peft": {"models"},
    "hydra": {"commands", "results", "assembly", "config"},
    "omegaconf": {"commands", "results", "assembly", "config"},
    "webdataset": {"data"},
}


def inside_name(module: str) -> str | None:
    """Return what follows `cascade_train.` in a module's name; None for other libraries."""
    head, _, rest = module.partition(".")
    return rest if head == "cascade_train" else None


def may_import(room: str, name: str) -> bool:
    allowed = INSIDE[room] | GROUND | {""}  # "" is the package itself, which imports nothing
    return any(name == entry or (entry and name.startswith(f"{entry}.")) for entry in allowed)


def test_every_room_of_the_library_has_a_rule() -> None:
    assert {file.room for file in library()} == {*INSIDE, "__init__"}
    assert len(library()) >= 20, f"found only {len(library())} files under {PACKAGE}"


@pytest.mark.parametrize("room", sorted(INSIDE))
def test_room_imports_only_what_lies_below_it(room: str) -> None:
    broken = [
        f"{file.name}:{line} imports {module}"
        for file in in_rooms(room)
        for module, line in file.imports()
        if (name := inside_name(module)) is not None and not may_import(room, name)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_room_uses_only_its_own_libraries(room: str) -> None:
    allowed = OUTSIDE[room] | set(sys.stdlib_module_names) | {"cascade_train"}
    broken = [
        f"{file.name}:{line} imports {module}"
        for file in in_rooms(room)
        for module, line in file.imports()
        if module.partition(".")[0] not in allowed
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", sorted(HOME))
def test_library_is_imported_only_at_its_home(package: str) -> None:
    broken = [
        f"{file.name}:{line} imports {module}"
        for file in library()
        for module, line in file.imports()
        if module.partition(".")[0] == package and file.room not in HOME[package]
    ]
    assert not broken, "\n".join(broken)


def names_of_modules() -> dict[str, SourceFile]:
    """Return the library's files by the names of their modules."""
    paths = {file: file.path.relative_to(PACKAGE.parent).with_suffix("").parts for file in library()}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): file for file, parts in paths.items()}


def imported_modules(file: SourceFile, modules: Mapping[str, SourceFile]) -> set[str]:
    """Return the modules of the library that a file imports, in functions too, but not for types alone."""
    types = [
        node for node in ast.walk(file.tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    for_types = {id(inner) for node in types for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import) and id(node) not in for_types:
            found |= {alias.name for alias in node.names}
    return found & modules.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = names_of_modules()
    graph = {name: imported_modules(file, modules) - {name, "cascade_train"} for name, file in modules.items()}
    assert sum(map(len, graph.values())) >= 500
    tuple(TopologicalSorter(graph).static_order())  # a CycleError names the cycle


def test_no_relative_imports() -> None:
    broken = [
        f"{file.name}:{node.lineno}"
        for file in library()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not broken, "\n".join(broken)
