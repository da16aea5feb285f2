"""JSON and YAML that come from outside, read within bounds: a few bytes may stand for more than the memory holds.

Whatever is wrong with a text is one error that its reader can count or explain; nothing in it ends the process.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

MAX_DEPTH = 50
"""Levels of lists and mappings within each other; what walks through values later need not fear for its stack."""

MAX_DIGITS = 1000
"""Of a whole number in YAML; Python itself refuses to read a JSON's, or to write one, beyond some thousands."""

INTEGER = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """Plain values without aliases, which say the same text again and again, each time larger."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one value and what is in it."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:20]}; write out what it stands for")
        self._depth += 1
        _refuse_deeper(self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag == INTEGER and len(node.value) > MAX_DIGITS:
            raise ValueError(f"it holds a number of {len(node.value)} digits")
        return node


def read_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or does not fit into memory.
    """
    try:
        value = json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error
    _check_depth(value)
    return value


def read_yaml(text: str | bytes) -> Any:
    """Return what a YAML text says.

    Raises:
        ValueError: it is no YAML, has aliases, is nested too deeply, holds a number without end, or does not fit into
            memory.
    """
    return _parsed(text, "get_single_data")


def check_yaml(text: str | bytes) -> None:
    """Check that another reader may have a YAML text.

    Raises:
        ValueError: see `read_yaml`; of values only their structure is looked at.
    """
    _parsed(text, "get_single_node")


def _parsed(text: str | bytes, what: str) -> Any:
    """Return what PyYAML makes of a text; it raises errors of many kinds for values that are none, such as dates."""
    try:
        loader = _Loader(text)
        try:
            return getattr(loader, what)()
        finally:
            loader.dispose()
    except ValueError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context}{line}") from error
    except Exception as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error


def _check_depth(value: Any) -> None:
    """Check how deep a value is, level by level."""
    level, depth = [value], 0
    while level:
        _refuse_deeper(depth)
        level = [child for each in level for child in _children(each)]
        depth += 1


def _refuse_deeper(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
