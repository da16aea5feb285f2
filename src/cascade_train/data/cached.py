"""Samples from a cache of latents and embeddings, made by `cascade-train cache`. No picture is read or decoded.

Rows, keys and shards are those of the data that the cache was made of: order and random draws are the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cascade_train.data.buckets import BucketTable, exact_table
from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import RowSelector, Selection
from cascade_train.data.latent_cache import (
    CacheManifest,
    caption_digest,
    load_table,
    read_index,
    read_manifest,
    read_span,
    refuse_changed,
    unit_file,
)
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.data.tar.storage import LocalFiles
from cascade_train.errors import ConfigError
from cascade_train.options import File, Free, Order


@dataclass(kw_only=True)
class Cached(Source):
    """The samples of a cache. Options of preprocessing follow the cache; a different value is refused."""

    is_cache: ClassVar[bool] = True
    path: Order[File[str]]
    source: Free[Source | None] = None
    crop: Literal["center", "random", "saliency"] = "center"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._folder = Path(self.path).expanduser()
        self._files = LocalFiles()
        self.manifest: CacheManifest  # what the opened cache holds

    def open(self) -> Index:
        """See `Source.open`: read the manifest, the index and the tables of all units."""
        self.manifest = read_manifest(self._folder)
        self._index = read_index(self._folder, self.manifest)
        tables = []
        for unit in range(self.manifest.units):
            table = load_table(self._folder, unit, self.manifest)
            if table is None:
                raise ConfigError(
                    f"data.path={self.path}: unit {unit} of {self.manifest.units} is missing or damaged. Run"
                    " cascade-train cache again with the arguments that made the cache: it keeps what is whole"
                    " and makes the rest."
                )
            tables.append(table)
        self._samples = np.concatenate([table.samples for table in tables])
        self._captions = np.concatenate([table.captions for table in tables])
        units = np.repeat(np.arange(len(tables)), [len(table.captions) for table in tables])
        self._digests, first = np.unique(np.concatenate([table.digests for table in tables]), return_index=True)
        self._captions, self._unit_of_caption = self._captions[first], units[first]
        self._index = replace(self._index, content=np.concatenate([table.content for table in tables]))
        if self.source is not None:
            remedy = "run cascade-train cache again, or train on what the cache holds,"
            refuse_changed(f"data.path={self.path}", self.source.open(), self._index, self.on_change, remedy)
        return self._index

    def bucket_table(self, index: Index) -> BucketTable:
        """Return the sizes at which the cache was made."""
        exact = exact_table(np.array(self.manifest.sizes, dtype=np.int64))
        of_one_area = len(np.unique(exact.ratio_E)) == len(exact.ratio_E)
        return replace(exact, distance="log") if of_one_area else exact  # of runs so far

    def selectors(self) -> list[RowSelector]:
        """Return selectors without the rows that the cache left out, and the quarantine's."""
        reason = "took no part when the cache was made"
        return [lambda index: Selection(kept=index.table["width"] > 0, reason=reason), *self.quarantine_selectors()]

    def read(self, row: int) -> RawSample:
        """See `Source.read`. A RunError where the cache is damaged."""
        spans = self._samples[row]
        if spans["bytes"].min() == 0:
            raise UnreadableSampleError("its picture was unreadable when the cache was made")
        path = unit_file(self._folder, "samples", row // self.manifest.unit_samples)
        tensors, meta = (read_span(self._files, path, span) for span in spans)
        arrays = {name: _array(tensor) for name, tensor in safetensors.torch.load(tensors).items()}
        known = {key: value for key, value in json.loads(meta).items() if key in ("caption", "weight", "values")}
        return RawSample(image=None, key=self._index.name(row), tensors=arrays, **known)

    def captions_of(self, row: int) -> Captions:
        """Return what makes a caption; those with cached embeddings stay as they are."""
        return Captions() if self.manifest.captions else self.captions

    def find_captions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the cached tensors of captions, (B, ...) by name; a ConfigError if one is missing."""
        found = {caption: safetensors.torch.load(self._read_caption(caption)) for caption in dict.fromkeys(captions)}
        return {name: torch.stack([found[caption][name] for caption in captions]) for name in self.manifest.captions}

    def _read_caption(self, caption: str) -> bytes:
        digest = caption_digest(caption).encode()
        place = int(np.searchsorted(self._digests, digest))
        if place == len(self._digests) or self._digests[place] != digest:
            raise ConfigError(
                f"the caption {caption[:80]!r} is not in the cache at data.path={self.path}: make a cache with these"
                " sample.prompts and this sample.negative_prompt, or with captions=false, which leaves captions to the"
                " text encoder"
            )
        path = unit_file(self._folder, "captions", int(self._unit_of_caption[place]))
        return read_span(self._files, path, self._captions[place])


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor for a batch; numpy has no bf16, which becomes fp32 without loss."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
