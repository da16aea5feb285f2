"""The folder of a run's checkpoints: names, atomic changes, manifests, and which checkpoints stay. Imports no torch.

A manifest has a checkpoint's format version, step and facts, and the size and hash of each of its files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import sync, write_durably
from cascade_train.files.untrusted import open_regular, read_json, read_regular, read_rows

log = logging.getLogger(__name__)

BEST = "best"
"""The fact of a manifest that ranks its checkpoint: {metric, value, step}."""

EVALUATIONS = "evaluation.jsonl"
"""Beside the folder of checkpoints: a line for each evaluation."""

EVALUATED = "evaluate/"
"""Prefix of their measures; `complete` adds those of a step to the facts of its manifest under this key."""

_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.step_(\d+)\.(saving|replaced|deleting)")

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


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
    """

    step: int
    files: dict[str, FileRecord]
    facts: dict[str, Any]

    @property
    def stamp(self) -> str:
        """A digest that changes with the files."""
        return _digest({name: asdict(record) for name, record in self.files.items()})[:16]


def hash_file(path: Path) -> FileRecord:
    """A file's size and hash."""
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
        return Manifest(step=body["step"], files=files, facts=body["facts"])
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is missing or damaged: {error!r}") from error


def find_fault(directory: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint; None = it verifies. Without `hashes` only names and sizes count."""
    try:
        manifest = read_manifest(directory)
    except RunError as error:
        return str(error)
    return _first_fault(directory, manifest, hashes=hashes)


def whole_manifest(directory: Path) -> Manifest | None:
    """Manifest of a checkpoint whose files have their sizes; None of another, or one that is going."""
    try:
        manifest = read_manifest(directory)
    except RunError:
        return None
    return manifest if _first_fault(directory, manifest, hashes=False) is None else None


def _first_fault(directory: Path, manifest: Manifest, *, hashes: bool) -> str | None:
    def fault(item: tuple[str, FileRecord]) -> str | None:
        return _file_fault(directory / item[0], item[1], hashes=hashes)

    if not hashes:  # sizes are known before threads have begun
        return next(filter(None, map(fault, manifest.files.items())), None)
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


class CheckpointFolder:
    """`<directory>/step_<n>/`, and hidden beside them what is being written or deleted; need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.directory / f"step_{step}"

    def hidden(self, step: int, kind: str) -> Path:
        """Folder in which a step's checkpoint is made (`saving`) before it is published."""
        return self.directory / f".step_{step}.{kind}"

    def visible(self) -> dict[int, Path]:
        """Existing checkpoints, damaged ones included, by step in order."""
        if not self.directory.is_dir():
            return {}
        matches = ((_VISIBLE.fullmatch(path.name), path) for path in self.directory.iterdir() if path.is_dir())
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def complete(self) -> dict[int, Manifest]:
        """Manifests of the checkpoints whose files have their sizes, by step in order.

        Numbers of later evaluations of the same weights are among their facts, as `EVALUATED`.
        """
        found = {step: each for step, path in self.visible().items() if (each := whole_manifest(path)) is not None}
        judged = evaluations(self.directory.with_name(EVALUATIONS), {step: each.stamp for step, each in found.items()})
        added = {step: {EVALUATED: numbers} for step, numbers in judged.items()}
        return {step: replace(each, facts={**each.facts, **added.get(step, {})}) for step, each in found.items()}

    def prepare(self, hidden: Path) -> None:
        """Clear what crashes left behind, and make an empty hidden directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.restore_replaced()
        for leftover in self._leftovers():
            shutil.rmtree(leftover, ignore_errors=leftover != hidden)  # NFS keeps files that a process holds open
        hidden.mkdir()

    def publish(self, hidden: Path, step: int) -> Path:
        """Move a whole hidden checkpoint to its place, and delete the one that lay there.

        After an OSError the older one is back at the latest when the folder is next read.
        """
        final, replaced = self.path(step), self.hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)
        hidden.rename(final)
        sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step; a failure is logged."""
        doomed = self.hidden(step, "deleting")
        try:
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint of step %d could not be deleted: %s", step, error)

    def restore_replaced(self) -> None:
        """Bring back a checkpoint that was moved aside by a crashed `publish`."""
        for path in self._leftovers():
            final = path.with_name(path.name[1:].removesuffix(".replaced"))
            if path.name.endswith(".replaced") and not final.exists():
                path.rename(final)

    def _leftovers(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if _HIDDEN.fullmatch(path.name))


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay, and why: the newest `keep_last` (None = all), those of every so many steps, and the best.

    `best_metric` is a key of `metrics.jsonl` or of `evaluation.jsonl`.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for key in ("keep_last", "keep_every_steps", "keep_best"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{key}={value} must be at least 1, or null to switch it off")

    def reasons(self, manifests: Mapping[int, Manifest]) -> dict[int, list[str]]:
        """Why each complete checkpoint stays, by step; those without a reason may go."""
        found: dict[int, list[str]] = {step: [] for step in sorted(manifests)}
        for step in sorted(manifests)[-(self.keep_last or 0) :]:
            found[step].append("all stay" if self.keep_last is None else f"newest {self.keep_last}")
        if self.keep_every_steps is not None:
            for step in (step for step in found if step % self.keep_every_steps == 0):
                found[step].append(f"every {self.keep_every_steps}")
        for place, step in enumerate(self._best(manifests), start=1):
            found[step].append(f"number {place} by {self.best_metric}")
        return found

    def _best(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Best steps, the best one first; of equals the later one."""
        values = {step: best_value(manifest, self.best_metric) for step, manifest in manifests.items()}
        sign = 1 if self.best_mode == "min" else -1
        ranked = sorted((sign * value, -step) for step, value in values.items() if value is not None)
        return [-step for _, step in ranked[: self.keep_best or 0]]


def best_value(manifest: Manifest, metric: str | None) -> float | None:
    """Metric's value that a checkpoint was saved with, or judged by; None where it has none."""
    judged = manifest.facts.get(EVALUATED, {})
    if metric in judged:
        return float(judged[metric])
    best = manifest.facts.get(BEST)
    return best["value"] if best is not None and best["metric"] == metric else None


def evaluations(path: Path, stamps: Mapping[int, str]) -> dict[int, dict[str, float]]:
    """Latest measures of evaluations by step and name.

    Left out are those of weights that another save replaced: a step's present weights are in `stamps`.
    """
    found: dict[int, dict[str, float]] = {}
    for row in evaluation_rows(path):
        weights = row.get("weights")
        if weights in (None, stamps.get(row["step"], weights)):
            numbers = {name: x for name, x in row.items() if name.startswith(EVALUATED) and isinstance(x, int | float)}
            found[row["step"]] = found.get(row["step"], {}) | numbers
    return found


def evaluation_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of evaluations, without torn ones."""
    return (row for row in read_rows(path, step=int) if "step" in row)


def last_logged(path: Path, metric: str, *, step: int) -> dict[str, Any] | None:
    """A metric of `metrics.jsonl` as last logged up to a step, {metric, value, step}; None where it is not."""
    rows = read_rows(path, json.dumps(metric).encode(), step=int)  # the loop may be appending a line
    logged = [row for row in rows if row.get("step", math.inf) <= step and row.get(metric) is not None]
    return {"metric": metric, "value": logged[-1][metric], "step": logged[-1]["step"]} if logged else None
