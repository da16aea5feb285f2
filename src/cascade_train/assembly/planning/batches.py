"""Micro-batches of a rehearsal: blank samples of the largest shape, or those of a cache.

Must not live here: what is done with them (rehearsal.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cascade_train.assembly.cache_identity import take_cache
from cascade_train.assembly.components import Parts, build_component
from cascade_train.assembly.planning.live import META
from cascade_train.batch import Batch
from cascade_train.config.saved import to_plain
from cascade_train.data.cached import Cached
from cascade_train.data.data_set import open_data_set
from cascade_train.filters.base import CONTROL, ControlFilter, ControlMap, Encode, float_map
from cascade_train.tasks.controlnet import ControlNet

ON_HOST = ("keep_image_B",)
"""Fields of prepared batches that a loss reads on the host."""


def blank_batch(cfg: DictConfig, parts: Parts, size: int) -> Batch:
    """Return a batch of blank samples of the largest shape, whose draws need the most memory."""
    source = build_component(cfg, "data")
    height, width = max(source.bucket_table(None).sizes_K2.tolist(), key=lambda each: each[0] * each[1])
    tensors: dict[str, Tensor] = {}
    if isinstance(parts.task, ControlNet):
        of_pictures = parts.task.bottleneck in ("effnet", "small")
        sides = (height, width) if of_pictures else parts.stage.latent_shape(height, width)[1:]
        tensors[CONTROL] = torch.zeros(size, parts.task.filter.channels, *sides)
    return WorstCaseBatch(
        image_BCHW=torch.zeros(size, 3, height, width, dtype=torch.uint8),
        captions=("a caption",) * size,
        keys=tuple(map(str, range(size))),
        epoch_B=torch.zeros(size, dtype=torch.int64),
        index_B=torch.arange(size),
        seed=0,
        tensors=tensors,
    )


def cached_batches(cfg: DictConfig, parts: Parts, sizes: Sequence[int]) -> list[Batch]:
    """Return batches of a cache, which parts that are not built yet are then to read from.

    Args:
        cfg: whose data is a cache, with the weights that it names.
        parts: of it or of `unloaded(cfg)`.
        sizes: of the batches.

    Raises:
        ConfigError: the cache is not there, or does not fit the run.
    """
    data = open_data_set(build_component(cfg, "data"), share=None, held_out=None)
    take_cache(to_plain(cfg), parts.stage, parts.task, cast("Cached", data.training.source))
    return [WorstCaseBatch(**vars(data.shown_batch(size, seed=cfg.run.seed))) for size in sizes]


class WorstCaseBatch(Batch):
    """A batch whose draws take the most memory: every image is a condition, and none shrinks."""

    def uniform(self, purpose: str) -> Tensor:
        """Return the end of [0, 1) that takes more memory, (B,)."""
        return torch.full((len(self),), 1.0 - 1e-6 if purpose == "shrink" else 0.0)


class NoFilter(ControlFilter):
    """Takes maps as they are, in the place of a filter whose files may not be here."""

    def __init__(self, instead_of: ControlFilter) -> None:
        self.channels = instead_of.channels
        self.node = instead_of.node  # type: ignore[method-assign]

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Return the maps of the batch."""
        return float_map


def on_meta(value: Any) -> Any:
    """Return a prepared batch on the meta device, except what a loss reads on the host."""
    changed = {
        field.name: tree_map_only(Tensor, lambda tensor: tensor.to(META), getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name not in ON_HOST
    }
    return dataclasses.replace(value, **changed)
