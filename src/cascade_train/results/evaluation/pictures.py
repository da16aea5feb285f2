"""Pictures of an evaluation: originals, held out or a user's, and the folder of those that are sampled.

Shape legend: B pictures of a batch, N of a set, C channels, H W size in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from cascade_train.assembly.components import build_component
from cascade_train.batch import Batch
from cascade_train.config.saved import composed
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.loading.worker import MicroBatches
from cascade_train.data.order.plan import Step
from cascade_train.data.source import Source
from cascade_train.engine.sampling import to_images
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import replacing
from cascade_train.files.untrusted import PICTURE_BYTES, open_regular

Numbers = tuple[int, ...]
"""Numbers of pictures that are always sampled together, so that rounding is the same."""

KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "csv", ".ndjson": "csv", ".parquet": "parquet"}
"""Option of `data` that reads a file, by its extension; a folder is data=folder, all else tars."""

AS_THEY_ARE = {"crop": "center", "flip_prob": 0.0}
"""Options of any data by which a picture is the same each time."""


class Originals:
    """Numbered pictures of an opened source, center-cropped to the sizes of its buckets."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.name, self._rows = name, rows
        table = rows.source.bucket_table(rows.index)
        width_N, height_N = (rows.index.table[side][rows.rows] for side in ("width", "height"))
        self._sizes_N2: np.ndarray = table.sizes_K2[table.nearest(width_N, height_N)]
        none = {(int(height), int(width)): np.zeros(0, dtype=np.int64) for height, width in table.sizes_K2}
        self._reader = MicroBatches(rows.source, rows.index, stand_ins=none, seed=0)

    @property
    def digest(self) -> str:
        """Changes with each picture that is added, removed or renamed, and with its size."""
        return f"{len(self)} of {self._rows.index.digest}"

    def __len__(self) -> int:
        return len(self._rows.rows)

    def first(self, count: int | None, *, seed: int) -> Originals:
        """Some of the pictures, drawn by the seed; None = all."""
        return self if count is None else Originals(self.name, self._rows.first(count, seed=seed))

    def batches(self, size: int) -> list[Numbers]:
        """Numbers of all pictures in batches of one shape, of at most `size`."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, (height, width) in enumerate(self._sizes_N2.tolist()):
            shapes.setdefault((height, width), []).append(number)
        return [tuple(same[start : start + size]) for same in shapes.values() for start in range(0, len(same), size)]

    def read(self, numbers: Sequence[int]) -> Batch:
        """Read pictures of one shape, (B, 3, H, W) uint8; a RunError names a damaged one."""
        rows = self._rows.rows[list(numbers)]
        height, width = self._sizes_N2[numbers[0]].tolist()
        batch = self._reader[Step(rows=rows, epochs=np.zeros_like(rows), height=height, width=width)]
        if isinstance(batch, RunError):
            raise RunError(f"{self.name}: {batch}. Mend or remove it.")
        return batch

    def images(self, numbers: Sequence[int]) -> list[Tensor]:
        """Read pictures of one shape, (3, H, W) uint8 each."""
        image_BCHW = self.read(numbers).image_BCHW
        assert image_BCHW is not None, "originals are pictures"
        return list(image_BCHW)

    def captions(self) -> list[str]:
        """Captions of all, without decoding the pictures."""
        source = self._rows.source
        rows = self._rows.rows.tolist()
        return [source.captions_of(row)(source.read(row), torch.Generator().manual_seed(0)) for row in rows]


def open_originals(cfg: DictConfig, real: Sequence[str]) -> Originals:
    """Open the pictures that a user names, or else those that a run held out."""
    if not real:
        return Originals("the run's held-out pictures", _held_out(cfg))
    try:
        source = _source(list(real), image_size=cfg.model.image_size)
        source.check()
        rows = open_data_set(source, share=None, held_out=None).training
    except ConfigError as error:
        raise ConfigError(f"real={','.join(real)}: {error}") from error
    return Originals(", ".join(real), rows)


def _held_out(cfg: DictConfig) -> Rows:
    options = {**AS_THEY_ARE, "image_size": cfg.model.image_size}
    source: Source = build_component(cfg, "data", **options)
    urls = cfg.validate.urls
    held_out = None if urls is None else build_component(cfg, "data", **options, urls=list(urls))
    rows = open_data_set(source, share=cfg.validate.share, held_out=held_out).held_out
    if rows is None or source.is_cache or not rows.index.rows_are_samples:
        reason = "held out no pictures (validate.share)" if rows is None else "has no pictures that can be numbered"
        raise ConfigError(f"real=null: {reason}. Name a folder, a table or tars of pictures: real=photos.")
    return rows


def _source(real: list[str], *, image_size: int) -> Source:
    suffix = Path(real[0]).suffix.lower()
    is_folder = Path(real[0]).expanduser().is_dir() or not (suffix or "://" in real[0])
    kind = "folder" if is_folder else KINDS.get(suffix, "webdataset")
    place = "urls" if kind == "webdataset" else "path"
    cfg = composed(["model=c_tiny", "task=finetune", "run.name=real", f"data={kind}", f"data.{place}=here"])
    named = real if len(real) > 1 or kind == "webdataset" else real[0]
    source: Source = build_component(cfg, "data", **AS_THEY_ARE, image_size=image_size, **{place: named})
    return source


@dataclass(frozen=True)
class Folder:
    """The pictures of an evaluation, numbered files on a file system that all ranks share."""

    path: Path

    def picture(self, number: int) -> Path:
        """Place of a picture."""
        return self.path / "pictures" / f"{number:06d}.png"

    def has(self, batch: Numbers) -> bool:
        """Whether all pictures of a batch are there."""
        return all(self.picture(number).is_file() for number in batch)

    def read(self, number: int) -> Tensor:
        """Read a picture, (3, H, W) uint8."""
        path = self.picture(number)
        try:
            with open_regular(path, limit=PICTURE_BYTES) as file, Image.open(file) as image:
                return torch.from_numpy(np.array(image.convert("RGB")).transpose(2, 0, 1).copy())
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all of them
            raise ConfigError(f"{path} is no whole picture ({error}); remove it, and it is made again") from error

    def read_all(self, batch: Numbers) -> list[Tensor]:
        """Read the pictures of a batch, (3, H, W) uint8 each."""
        return [self.read(number) for number in batch]

    def save(self, batch: Numbers, image_BCHW: Tensor) -> None:
        """Write the pictures of a batch that are not there, (B, 3, H, W) float in [0, 1], each whole or not at all."""
        (self.path / "pictures").mkdir(parents=True, exist_ok=True)
        for number, image in zip(batch, to_images(image_BCHW), strict=True):
            if not self.picture(number).is_file():
                with replacing(self.picture(number), racing=True, durable=False) as beside:
                    image.save(beside)
