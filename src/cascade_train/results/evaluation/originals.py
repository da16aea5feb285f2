"""Pictures that no model made, to reconstruct, to take captions from, and to compare with: held-out ones, or a user's.

Shape legend: B batch, N pictures, H W size in pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from cascade_train.assembly.components import build_component
from cascade_train.batch import Batch
from cascade_train.config.saved import composed
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.loading.worker import MicroBatches
from cascade_train.data.order.plan import Step
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError

KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "csv", ".ndjson": "csv", ".parquet": "parquet"}
"""Option of `data` that reads a file, by its extension; a folder is data=folder, all else tars."""

AS_THEY_ARE = {"crop": "center", "flip_prob": 0.0}
"""Options of any data by which a picture is the same each time."""


class Originals:
    """Pictures of an opened source, numbered from 0, cropped to the middle at the sizes that its buckets have.

    Attributes:
        name: what they are, to show.
    """

    def __init__(self, name: str, rows: Rows) -> None:
        self.name, self._rows = name, rows
        table = rows.source.bucket_table(rows.index)
        width_N, height_N = (rows.index.table[side][rows.rows] for side in ("width", "height"))
        self._sizes_N2: np.ndarray = table.sizes_K2[table.nearest(width_N, height_N)]
        none = {(int(height), int(width)): np.zeros(0, dtype=np.int64) for height, width in table.sizes_K2}
        self._reader = MicroBatches(rows.source, rows.index, stand_ins=none, seed=0)

    @property
    def digest(self) -> str:
        """16 hex digits that change when a picture is added, removed, renamed or of another size."""
        state = hashlib.sha256(self._rows.index.digest.encode())
        for array in (self._rows.rows, self._sizes_N2):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._rows.rows)

    def first(self, count: int | None, *, seed: int) -> Originals:
        """Return `count` of the pictures, drawn by the seed; None = all."""
        return self if count is None else Originals(self.name, self._rows.first(count, seed=seed))

    def batches(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of all pictures in batches of one shape, of at most `size`: the same ones each time."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, (height, width) in enumerate(self._sizes_N2.tolist()):
            shapes.setdefault((height, width), []).append(number)
        return [tuple(same[start : start + size]) for same in shapes.values() for start in range(0, len(same), size)]

    def read(self, numbers: Sequence[int]) -> Batch:
        """Read pictures of one shape, (B, 3, H, W) uint8, and their captions; a RunError names one that is damaged."""
        rows = self._rows.rows[list(numbers)]
        height, width = self._sizes_N2[numbers[0]].tolist()
        made = self._reader[Step(rows=rows, epochs=np.zeros_like(rows), height=height, width=width)]
        if isinstance(made, RunError):
            raise RunError(f"{self.name}: {made}. Mend or remove it.")
        return made

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """Return captions without decoding the pictures."""
        source = self._rows.source
        rows = self._rows.rows[list(numbers)].tolist()
        return [source.captions_of(row)(source.read(row), torch.Generator().manual_seed(0)) for row in rows]


def open_originals(cfg: DictConfig, real: Sequence[str], *, key: str = "real") -> Originals:
    """Open the pictures that a user names, or, where none are, those that a run of a configuration held out.

    Raises:
        ConfigError: nothing is there, or nothing was held out.
    """
    if not real:
        return Originals("the run's held-out pictures", _held_out(cfg, key))
    try:
        source = _source(list(real), image_size=cfg.model.image_size)
        source.check()
        rows = open_data_set(source, share=None, held_out=None).training
    except ConfigError as error:
        raise ConfigError(f"{key}={','.join(real)}: {error}") from error
    return Originals(", ".join(real), rows)


def _held_out(cfg: DictConfig, key: str) -> Rows:
    options = {**AS_THEY_ARE, "image_size": cfg.model.image_size}
    source: Source = build_component(cfg, "data", **options)
    given = cfg.validate.urls
    held_out = None if given is None else build_component(cfg, "data", **options, urls=list(given))
    rows = open_data_set(source, share=cfg.validate.share, held_out=held_out).held_out
    if rows is None or source.is_cache or not rows.index.rows_are_samples:
        reason = "held out no pictures (validate.share)" if rows is None else "has no pictures that can be numbered"
        raise ConfigError(f"{key}=null: {reason}. Name a folder, a table or tars of pictures: {key}=photos.")
    return rows


def _source(real: list[str], *, image_size: int) -> Source:
    """Return the source that reads a folder, tables or tars."""
    kind = "folder" if Path(real[0]).expanduser().is_dir() else KINDS.get(Path(real[0]).suffix.lower(), "webdataset")
    place = "urls" if kind == "webdataset" else "path"
    cfg = composed(["model=c_tiny", "task=finetune", "run.name=real", f"data={kind}", f"data.{place}=here"])
    named = real if len(real) > 1 or kind == "webdataset" else real[0]
    source: Source = build_component(cfg, "data", **AS_THEY_ARE, image_size=image_size, **{place: named})
    return source
