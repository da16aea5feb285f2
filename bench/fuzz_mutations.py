"""What is done to a file before a command of bench/fuzz_readers.py reads it: damage that is drawn from a generator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml
from PIL import Image

HUGE_BYTES = 20 << 30
"""Of a sparse file, which takes no place on the disk."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**12),
    *("", "\0", "\ud800", "é" * 5000, "../../elsewhere", "/dev/zero", "(a+)+$", "${oc.env:HOME}", "${", "???"),
    *([], {}, [[[]]], [1] * 10_000, {"_target_": "os.getcwd"}, {"": {"a.b": 1}}),
)
ODD_KEYS: tuple[tuple[str, Any], ...] = (
    *(("_args_", [1]), ("_recursive_", False), ("_partial_", True), ("_convert_", "all"), ("_target_", "os.getcwd")),
    *(("", 1), ("\0", 1), ("a.b", 1), ("é" * 300, {})),
)
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a brace": b"{",
    "1,000 brackets": b"[" * 1000,
    "100,000 brackets": b"[" * 100_000,
    "NUL": bytes(100),
    "latin-1": '{"caption": "é"}\n'.encode("latin-1"),
    "a number of 4,000 digits": b"1" * 4000,
    "keys a.a.a": b"a." * 20_000 + b"a = 1\n",
    "aliases": b"a: &a [1]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 121)),
    "4,000 losses of 1e308": b"".join(b'{"step": %d, "loss": 1e308}\n' % step for step in range(1, 4001)),
}


def mutated(path: Path, draw: Random) -> str:
    """Damage a file and say how."""
    text = path.read_bytes()
    kinds: list[Callable[[Path, bytes, Random], str]] = [_other_kind, _bytes, _bytes]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        kinds += [_value] * 4
    if path.suffix == ".png":
        kinds += [_picture] * 2
    return draw.choice(kinds)(path, text, draw)


def _other_kind(path: Path, _: bytes, draw: Random) -> str:
    """Put something in a file's place: no regular file, a huge one, or one of TEXTS."""
    kind = draw.choice(("pipe", "zeros", "folder", "nowhere", "itself", "20 GB", *TEXTS))
    if kind == "20 GB":
        os.truncate(path, HUGE_BYTES)
        return kind
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in TEXTS:
        path.write_bytes(TEXTS[kind])
    else:
        path.symlink_to({"zeros": "/dev/zero", "nowhere": "nowhere", "itself": path.name}[kind])
    return {"zeros": "link to /dev/zero", "nowhere": "dangling link", "itself": "link to itself"}.get(kind, kind)


def _bytes(path: Path, text: bytes, draw: Random) -> str:
    """Cut a file, repeat a part of it, or change some of its bytes."""
    kind, at = draw.choice(("cut", "repeated", "flipped")), draw.randrange(len(text) + 1)
    if kind == "cut":
        path.write_bytes(text[:at])
    elif kind == "repeated":
        path.write_bytes(text[:at] + text[at : at + draw.randrange(1, 200)] * draw.choice((2, 100, 10_000)))
    else:
        changed = bytearray(text)
        for place in draw.choices(range(len(text)), k=draw.choice((1, 1, 8))) if text else ():
            changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    return kind


def _picture(path: Path, _: bytes, draw: Random) -> str:
    """Give a picture another size or mode."""
    size = draw.choice(((1, 1), (33, 32), (5000, 1), (64, 64)))
    mode = draw.choice(("RGB", "L", "RGBA", "P", "I;16"))
    Image.new(mode, size).save(path)
    return f"a picture of {size[0]} x {size[1]}, {mode}"


def _value(path: Path, text: bytes, draw: Random) -> str:
    """Replace, add or remove one value of a JSON, JSON Lines or YAML file."""
    if path.suffix == ".yaml":
        root = [yaml.load(text, yaml.CSafeLoader)]
        kind = _change(root, draw)
        path.write_text(yaml.dump(root[0], sort_keys=False), errors="surrogatepass")
        return kind
    parts = text.splitlines() if path.suffix == ".jsonl" else [text]
    root = [json.loads(part) for part in parts]
    kind = _change(root, draw)
    path.write_text("\n".join(map(json.dumps, root)) + "\n")
    return kind


def _change(root: list[Any], draw: Random) -> str:
    """Change one value at any depth; a number also to a million times itself."""
    room, key = draw.choice(list(_places(root)))
    value = room[key]
    if isinstance(value, dict) and draw.random() < 0.3:
        added, value[added] = draw.choice(ODD_KEYS)
        return f"key {added[:12]!a} added"
    if room is not root and draw.random() < 0.1:
        del room[key]
        return "value removed"
    if isinstance(value, int) and draw.random() < 0.3:
        room[key] = value * 10**6
        return "number a million times as large"
    room[key] = draw.choice(ODD_VALUES)
    return f"value {str(room[key])[:16]!a}"


def _places(room: list[Any] | dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each list or mapping with each of its indices or keys."""
    for key, value in room.items() if isinstance(room, dict) else enumerate(room):
        yield room, key
        if isinstance(value, dict | list):
            yield from _places(value)
