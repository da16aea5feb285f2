"""YAML of plain values, written by libyaml where PyYAML has it: the same values, many times as fast."""

from __future__ import annotations

from functools import partial
from typing import Any

import yaml

_DUMPER: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


def to_yaml(value: Any, *, allow_unicode: bool = False) -> str:
    """Return a YAML text of nested dicts, lists and plain values, keys in their order."""
    write = partial(yaml.dump, value, sort_keys=False, allow_unicode=allow_unicode)
    try:
        text: str = write(Dumper=_DUMPER)
    except UnicodeEncodeError:  # half a character of UTF-16, which libyaml does not escape
        text = write(Dumper=yaml.SafeDumper)
    return text
