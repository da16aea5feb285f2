"""Change every default that ships by a little, one at a time, and count the changes that no test notices.

    python bench/mutate_defaults.py --out bench/results/mutate_defaults.md

Works on a copy of conf/ and src/ in a temporary folder, in one process: the tests of tests/unit/config/test_defaults.py
that look at the changed file are called as functions. Ends with 1 where a change is not noticed.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSED_BY = {"config": ("tracker", "none"), "data/_base": ("data", "folder")}
"""Options whose composition shows a file that is no option itself."""

JUDGES = ("list of the file", "composition", "nobody")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One default with another value.

    Attributes:
        path: of the file, in the copy.
        text: of the whole file with the change in it.
        file: its name in the lists; "python" for sources.
        key: what is changed.
        before: its value.
        after: its value in `text`.
    """

    path: Path
    text: str
    file: str
    key: str
    before: Any
    after: Any


def others(value: Any, options: list[str]) -> Iterator[Any]:
    """Yield what a default may be changed to: near numbers, the other switch, another word, each element of a list."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * 1.01 if value else 0.01
    elif isinstance(value, str):
        yield next((option for option in options if option != value), f"{value}x")
    else:
        for place, element in enumerate(value):
            for other in others(element, []):
                yield [*value[:place], other, *value[place + 1 :]]


def yaml_changes(lists: ModuleType, file: str, folder: Path) -> Iterator[Change]:
    """Yield the changes of a file of conf/."""
    from cascade_train.config.groups import group_options

    path = folder / f"{file}.yaml"
    text = path.read_text()
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    for key, value in lists.defaults(file).items():
        group = key.removeprefix("defaults.").partition("@")[0]
        for other in others(value, group_options(group) if key.startswith("defaults.") else []):
            node = yaml.safe_load(text)
            replace(node, key, other)
            changed = comments + yaml.safe_dump(node, sort_keys=False)
            yield Change(path=path, text=changed, file=file, key=key, before=value, after=other)


def replace(node: dict[str, Any], key: str, value: Any) -> None:
    """Put a value, or the choice of a group, into the nested values of a file."""
    if key.startswith("defaults."):
        group = key.removeprefix("defaults.")
        for entry in node["defaults"]:
            for name in entry if isinstance(entry, dict) else ():
                if name.removeprefix("override ").replace("/", "") == group:
                    entry[name] = value
        return
    *path, leaf = key.split(".")
    for name in path:
        node = node[name]
    node[leaf] = value


def python_changes(lists: ModuleType, folder: Path) -> Iterator[Change]:
    """Yield the changes of defaults in signatures and constants."""
    for name in lists.listed("python"):
        value = lists.python_expression(name)
        path = folder / Path(*lists.python_module(name).split(".")).with_suffix(".py")
        lines = path.read_text().splitlines(keepends=True)
        before = ast.literal_eval(value)
        for after in others(before, []):
            line = lines[value.lineno - 1]
            changed = line[: value.col_offset] + repr(after) + line[value.end_col_offset :]
            text = "".join([*lines[: value.lineno - 1], changed, *lines[value.lineno :]])
            yield Change(path=path, text=text, file="python", key=name, before=before, after=after)


@contextmanager
def applied(change: Change) -> Iterator[None]:
    """Write a change, and take it back."""
    before = change.path.read_text()
    change.path.write_text(change.text)
    try:
        yield
    finally:
        change.path.write_text(before)


def judge(change: Change, tests: ModuleType) -> str:
    """Return which of JUDGES notices a change first."""
    if change.file == "python":
        tried: dict[str, Callable[[], None]] = {JUDGES[0]: tests.test_every_default_in_python_is_in_a_list}
    else:
        group, _, option = change.file.partition("/")
        shown = COMPOSED_BY.get(change.file, (group, option))
        tried = {JUDGES[0]: lambda: tests.test_every_default_of_a_file_is_in_a_list(change.file)}
        if shown in tests.test_every_option.OPTIONS:
            tried[JUDGES[1]] = lambda: tests.test_every_option.listed_composition(*shown)
    for name, test in tried.items():
        try:
            test()
        except Exception:  # a composition that is refused is a change that is noticed
            return name
    return JUDGES[2]


def page(judged: list[tuple[Change, str]], published: dict[str, Any], seconds: float) -> list[str]:
    """Return the result as Markdown."""
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    unnoticed = [change for change, name in judged if name == JUDGES[2]]
    lines = [
        "# Changed defaults",
        "",
        f"`python bench/mutate_defaults.py` at {commit.strip()}, {datetime.now(UTC):%Y-%m-%d}, {seconds:.0f} seconds.",
        "",
        f"{len(judged)} changes, one at a time: numbers by one or one percent, other switches, words, options.",
        f"**{len(unnoticed)} are noticed by no test.**",
        "",
        "| default in | changes | the original's value | our own, with its reason | " + " | ".join(JUDGES) + " |",
        "|---|" + "---|" * (3 + len(JUDGES)),
    ]
    groups = {change.file.partition("/")[0]: None for change, _ in judged}
    for group in [*groups, "all"]:
        part = [(c, name) for c, name in judged if group in ("all", c.file.partition("/")[0])]
        originals = sum(c.key in published(c.file) for c, _ in part)
        counts = Counter(name for _, name in part)
        numbers = [len(part), originals, len(part) - originals, *(counts[name] for name in JUDGES)]
        lines.append(f"| {group} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "The first test that notices counts: of the file beside its lists, else of its composition."]
    return lines + [f"- {c.file} {c.key}: {c.before} became {c.after}" for c in unnoticed]


def run(folder: Path) -> tuple[list[tuple[Change, str]], Callable[[str], Any]]:
    """Judge every change in a copy of the checkout; return them, and what the original publishes of a file."""
    for name in ("conf", "src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cases"))
    sys.path[:0] = [str(folder / "src"), str(folder)]
    from tests.unit.config import defaults, test_defaults

    def published(file: str) -> Any:
        name = file.removeprefix("experiment/")
        return defaults.recipe_values(name) if name in defaults.RECIPES else defaults.PUBLISHED.get(file, {})

    changes = [c for file in defaults.shipped_files() for c in yaml_changes(defaults, file, folder / "conf")]
    changes += python_changes(defaults, folder / "src" / "cascade_train")
    judged = []
    for number, change in enumerate(changes):
        with applied(change):
            judged.append((change, judge(change, test_defaults)))
        if number % 100 == 0:
            print(f"{number} of {len(changes)}", file=sys.stderr)
    return judged, published


def main() -> int:
    """Judge, show the page, and return 1 where a change is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the page; without it, it is printed alone")
    out = parser.parse_args().out
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        judged, published = run(Path(folder))
    lines = page(judged, published, time.monotonic() - start)
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    return int(any(name == JUDGES[2] for _, name in judged))


if __name__ == "__main__":
    sys.exit(main())
