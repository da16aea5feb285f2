"""Every error a user may meet has been seen by a test.

A raise counts as seen when some `match=` of the suite contains words of its message that no other raise of the
library uses; so a pattern that fits any message proves nothing about one of them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

from tests.style.source import ROOT, library, text_of

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


@cache
def patterns() -> frozenset[str]:
    """Return the pieces of every `match=` in the suite, its escapes taken away and its wildcards cut out."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "match":
                for text in (text for expression in ast.walk(node.value) for text in literal(expression)):
                    for run in re.split(r"(?<!\\)[.\[\](){}*+?|^$]+", text):
                        found |= pieces(re.sub(r"\\(.)", r"\1", run))
    return frozenset(found)


def literal(expression: ast.AST) -> list[str]:
    return text_of(expression) if isinstance(expression, ast.expr) else []


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
