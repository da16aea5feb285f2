"""What describes a cache: the manifest, and the index that its rows follow.

The tensors themselves lie in units (latent_cache/units.py). What makes them is the `cache` verb's business.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.index.rows import Index
from cascade_train.errors import ConfigError
from cascade_train.files.durable import replacing, write_durably

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.npz"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds and what it was made from; every process that fills a cache writes the same one.

    Attributes:
        format: of the files.
        rows: of the source's index.
        unit_samples: rows of one unit.
        index: digest of the index, whose sizes are those that the pictures are trained at, 0 where a row takes no part.
        filters: identity of the filters that chose the source's rows; empty = none.
        sizes: height and width in pixels of each shape that the source trains at, in its order.
        tensors: of a sample, by name: dtype, and shape for the square of the run's image size.
        captions: of a caption, by name: dtype and shape; empty = the cache holds no captions.
        identity: everything that changes a value, by its configuration key.
        made_with: versions of the libraries that made the tensors.
    """

    format: int = FORMAT
    rows: int
    unit_samples: int
    index: str
    filters: str
    sizes: list[list[int]]
    tensors: Mapping[str, str]
    captions: Mapping[str, str]
    identity: Mapping[str, Any]
    made_with: Mapping[str, str]

    @property
    def units(self) -> int:
        """How many units the rows make."""
        return -(-self.rows // self.unit_samples)

    @property
    def digest(self) -> str:
        """16 hex digits that change with anything but the libraries' versions."""
        fields = dataclasses.asdict(self) | {"made_with": None}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def rows_of(self, unit: int) -> range:
        """Return the rows of a unit."""
        return range(unit * self.unit_samples, min(self.rows, (unit + 1) * self.unit_samples))


def write_manifest(folder: Path, manifest: Manifest, index: Index) -> None:
    """Write what describes a cache, or find that it is there and the same.

    Raises:
        ConfigError: the folder holds a cache of something else, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).is_file():
            difference = first_difference(manifest, read_manifest(folder))
            if difference is not None:
                raise ConfigError(
                    f"out={folder} holds another cache: {difference}. Choose another folder, or remove it."
                )
            return
        text = json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True)
        shards = np.array(index.shards)
        with replacing(folder / INDEX, racing=True) as partial:
            np.savez(partial, table=index.table, keys=index.keys, shards=shards)
        write_durably(folder / MANIFEST, text, racing=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written ({error}). Choose another folder.") from error


def first_difference(manifest: Manifest, other: Manifest) -> str | None:
    """Return in what two manifests differ, the libraries' versions aside; None = in nothing."""
    for name in ("format", "unit_samples", "index", "filters", "sizes", "rows", "tensors", "captions"):
        if getattr(manifest, name) != getattr(other, name):
            return f"{name} is {getattr(manifest, name)} here and {getattr(other, name)} there"
    for key in sorted(manifest.identity.keys() | other.identity.keys()):
        own, its = manifest.identity.get(key), other.identity.get(key)
        if own != its:
            return f"{key} is {own} here and {its} there"
    return None


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a cache.

    Raises:
        ConfigError: there is none, or it is damaged or of another version of the library.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"data.path={folder}: no cache lies there, since there is no {MANIFEST}. Make one by"
            " cascade-train cache … out=<folder>, with the settings of the run."
        )
    try:
        fields = json.loads(path.read_text())
        if fields["format"] == FORMAT:
            return Manifest(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error}). Remove the cache and make it again.") from error
    raise ConfigError(f"{path} has format {fields['format']}, this version reads {FORMAT}. Make the cache again.")


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Return the index that a cache follows.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        with (folder / INDEX).open("rb") as file, np.load(file, allow_pickle=False) as parts:
            index = Index(
                shards=tuple(parts["shards"].tolist()),
                table=parts["table"],
                keys=parts["keys"],
                filters=manifest.filters,
            )
    except Exception as error:  # numpy and zipfile answer damage in many ways
        raise ConfigError(f"{folder / INDEX} is damaged ({error}). Remove the cache and make it again.") from error
    if index.digest != manifest.index:
        raise ConfigError(f"{folder / INDEX} is not the index of this cache. Remove the cache and make it again.")
    return index
