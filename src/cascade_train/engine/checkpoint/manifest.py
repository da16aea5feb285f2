"""The manifest of a checkpoint: its format version, step, facts, and the size and hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cascade_train.errors import RunError
from cascade_train.files.durable import write_durably
from cascade_train.files.untrusted import open_regular, read_json, read_regular

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_INTEGERS = ("step", "facts.step", "facts.samples_seen", "facts.max_steps", "facts.data.position")
_MAPPINGS = ("facts", "facts.data", "facts.losses", "facts.best", "facts.data.start")
TYPES: dict[str, Any] = {
    **dict.fromkeys(_MAPPINGS, dict),  # before what they contain
    **dict.fromkeys((*_INTEGERS, "facts.data.global_batch_size"), int),
    **dict.fromkeys(("has_optimizer", "facts.finished"), bool),
    **dict.fromkeys(("name", "weights", "facts.tracker_run_id"), str | None),
    **dict.fromkeys(("facts.data.identity", "facts.data.content", "facts.best.metric"), str),
    **{"facts.data.streams": list, "facts.best.value": int | float},
}
"""Types of what the loop writes and later relies on; not all of it is in every manifest."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes, and the hex digest of its bytes."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: its optimizer step.
        files: every file beside the manifest, by name.
        facts: what the loop needs without loading tensors.
        has_optimizer: a run can continue from it exactly; false once the optimizer state was dropped.
        name: given by `checkpoints promote`; a checkpoint with a name is never deleted.
        weights: its stamp when it was saved, if its files have changed since.
    """

    step: int
    files: dict[str, FileRecord]
    facts: dict[str, Any]
    has_optimizer: bool = True
    name: str | None = None
    weights: str | None = None

    @property
    def stamp(self) -> str:
        """A digest that changes with the weights, but not when the checkpoint is named or loses its optimizer."""
        return self.weights or _digest({name: asdict(record) for name, record in self.files.items()})[:16]


def hash_file(path: Path) -> FileRecord:
    """Return a file's size and hash."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size=file.tell(), sha256=digest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `<directory>/manifest.json` durably."""
    body = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    write_durably(directory / MANIFEST_NAME, json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read `<directory>/manifest.json`; a RunError if it is missing, damaged, or of another format version."""
    path = directory / MANIFEST_NAME
    try:
        body = read_json(read_regular(path))
        if body.pop("sha256") != _digest(body):
            raise ValueError("it does not match its own hash")
        if (version := body.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(f"it has format version {version}, this program reads {FORMAT_VERSION}")
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        if any(Path(name).name != name for name in files):
            raise ValueError("it names files outside its folder")
        _check_types(body, files)
        optional = {key: body[key] for key in ("has_optimizer", "name", "weights") if key in body}
        return Manifest(step=body["step"], files=files, facts=body["facts"], **optional)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is missing or damaged: {error!r}") from error


def _check_types(body: dict[str, Any], files: dict[str, FileRecord]) -> None:
    """Raise ValueError where a value has another type than the loop relies on."""
    for name, record in files.items():
        if type(record.size) is not int or type(record.sha256) is not str:
            raise ValueError(f"files.{name} has a size or a hash of another type")
    for key, kind in TYPES.items():
        *path, name = key.split(".")
        node: Any = body
        for each in path:
            node = node.get(each, {})
        if name in node and (not isinstance(node[name], kind) or (isinstance(node[name], bool) and kind is not bool)):
            raise ValueError(f"{key} is {type(node[name]).__name__}")


def find_fault(directory: Path, *, hashes: bool = True) -> str | None:
    """Return what is wrong with a checkpoint; None = it verifies. Without `hashes` only names and sizes count."""
    try:
        manifest = read_manifest(directory)
    except RunError as error:
        return str(error)
    return _first_fault(directory, manifest, hashes=hashes)


def whole_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a checkpoint whose files have their sizes; None of another, or one that is going."""
    try:
        manifest = read_manifest(directory)
    except RunError:
        return None
    return manifest if _first_fault(directory, manifest, hashes=False) is None else None


def _first_fault(directory: Path, manifest: Manifest, *, hashes: bool) -> str | None:
    def fault(item: tuple[str, FileRecord]) -> str | None:
        return _file_fault(directory / item[0], item[1], hashes=hashes)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return next(filter(None, pool.map(fault, manifest.files.items())), None)


def _file_fault(path: Path, record: FileRecord, *, hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path.name} has {size} bytes, its manifest says {record.size}"
        if hashes and hash_file(path).sha256 != record.sha256:
            return f"{path.name} does not match the hash in its manifest"
    except (OSError, ValueError) as error:
        return f"{path.name} cannot be read: {getattr(error, 'strerror', error)}"
    return None


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
