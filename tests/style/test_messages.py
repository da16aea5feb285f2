"""Every error a user may meet has been seen by a test.

A raise counts as seen when a `match=` of the suite, or an `assert "..." in output`, contains words of its message
that no other raise of the library uses; so a pattern that fits any message proves nothing about one of them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

from tests.style.source import ROOT, Function, library, text_of

ERRORS = {"ConfigError", "RunError", "ValueError"}
LENGTH = 10
"""Characters in a row that a pattern and a message must share."""

SEEN_SHARE = 0.9
WORDED_SHARE = 0.8


def pieces(text: str) -> set[str]:
    """Return every run of LENGTH characters of a text, white space made single."""
    plain = re.sub(r"\s+", " ", text)
    return {plain[i : i + LENGTH] for i in range(len(plain) - LENGTH + 1)}


@cache
def messages() -> dict[str, frozenset[str]]:
    """Return place -> pieces of the literal message of each raise of a user's error."""
    found: dict[str, frozenset[str]] = {}
    for file in library():
        for node in ast.walk(file.tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            call = node.exc
            if isinstance(call.func, ast.Name) and call.func.id in ERRORS:
                texts = [text for argument in call.args for text in text_of(argument)]
                found[f"{file.name}:{node.lineno}"] = frozenset(piece for text in texts for piece in pieces(text))
    return found


def expectations(test: ast.Module) -> list[str]:
    """Return what a test file expects to read: each `match=`, each `assert "..." in`, and the parameters behind them.

    Where a `match=` is a name, the strings of the function's decorators count, and of the module's constants that the
    decorators name.
    """
    found: list[ast.AST] = []
    constants = {t.id: n.value for n in test.body if isinstance(n, ast.Assign) for t in n.targets if is_name(t)}
    for function in (node for node in ast.walk(test) if isinstance(node, Function)):
        expected = [node.value for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg == "match"]
        found += expected
        found += [node.left for node in ast.walk(function) if is_membership(node)]
        if any(not text_of(value) for value in expected):
            found += function.decorator_list
            names = [node.id for d in function.decorator_list for node in ast.walk(d) if isinstance(node, ast.Name)]
            found += [constants[name] for name in names if name in constants]
    return [text for root in found for node in ast.walk(root) if isinstance(node, ast.expr) for text in text_of(node)]


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def is_membership(node: ast.AST) -> bool:
    """Return whether a node is `left in right`, as in an assert about printed output."""
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)


@cache
def patterns() -> frozenset[str]:
    """Return the pieces of everything the suite expects, escapes taken away and wildcards cut out."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for text in expectations(ast.parse(path.read_text())):
            for run in re.split(r"(?<!\\)[.\[\](){}*+?|^$]+", text):
                found |= pieces(re.sub(r"\\(.)", r"\1", run)) | pieces(run)
    return frozenset(found)


def distinctive() -> dict[str, frozenset[str]]:
    """Return place -> the pieces of its message that no other raise has."""
    uses = Counter(piece for found in messages().values() for piece in found)
    return {place: frozenset(p for p in found if uses[p] == 1) for place, found in messages().items()}


def test_messages_are_written_where_they_are_raised() -> None:
    worded = [place for place, found in distinctive().items() if found]
    assert len(worded) >= 40
    bare = sorted(set(messages()) - set(worded))
    assert len(worded) >= WORDED_SHARE * len(messages()), bare


def test_nearly_every_message_is_matched_by_a_test() -> None:
    worded = {place: found for place, found in distinctive().items() if found}
    unseen = sorted(place for place, found in worded.items() if not found & patterns())
    share = 1 - len(unseen) / len(worded)
    assert share >= SEEN_SHARE, f"{share:.0%} of {len(worded)} messages are matched; not these:\n" + "\n".join(unseen)


def test_a_pattern_that_fits_everything_proves_nothing() -> None:
    assert pieces("must be") == set()
    assert "needs exac" in pieces("needs  exactly one")
