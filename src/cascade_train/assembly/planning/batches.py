"""Micro-batches of a rehearsal: blank samples of the largest shape, and one batch that stands for all sizes.

Must not live here: what is done with them (rehearsal.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cascade_train.assembly.cache_identity import take_cache
from cascade_train.assembly.components import Parts, build_component
from cascade_train.assembly.planning.shapes import META
from cascade_train.batch import Batch
from cascade_train.config.saved import to_plain
from cascade_train.data.cached import Cached
from cascade_train.data.data_set import open_data_set
from cascade_train.filters.base import CONTROL, ControlFilter, ControlMap, Encode, arrived
from cascade_train.tasks.controlnet import ControlNet

ON_HOST = ("keep_image_B",)
"""Fields of prepared batches that a loss reads on the host."""

PRIME = 1009
"""Samples of a batch that stands for all sizes: a storage whose bytes it divides has a batch dimension."""


def blank_batch(cfg: DictConfig, parts: Parts, size: int) -> Batch:
    """Return a batch of blank samples of the largest shape, whose draws need the most memory."""
    source = build_component(cfg, "data")
    height, width = max(source.bucket_table(None).sizes_K2.tolist(), key=lambda each: each[0] * each[1])
    tensors: dict[str, Tensor] = {}
    if isinstance(parts.task, ControlNet):
        of_pictures = parts.task.bottleneck in ("effnet", "small")
        sides = (height, width) if of_pictures else parts.stage.latent_shape(height, width)[1:]
        tensors[CONTROL] = torch.zeros(size, parts.task.filter.channels, *sides)
    return Costly(
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
    return [Costly(**vars(data.shown_batch(size, seed=cfg.run.seed))) for size in sizes]


class Costly(Batch):
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
        return arrived


def of_size(size: int, prepared: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return a prepared batch of another size, of which those of two sizes are known; all its samples are alike."""
    small, step = sizes[0], sizes[1] - sizes[0]

    def grown(one: int, other: int) -> int:
        return one + (other - one) // step * (size - small)

    def sized(first: Any, second: Any, *, on_host: bool) -> Any:
        if isinstance(first, Tensor) and first.shape != second.shape:
            shape = tuple(map(grown, first.shape, second.shape))
            if not on_host:
                return torch.empty(shape, dtype=first.dtype, device=META)
            return first.new_empty(shape).copy_(first.narrow(0, 0, 1))
        if isinstance(first, Mapping):
            return {name: sized(value, second[name], on_host=on_host) for name, value in first.items()}
        if isinstance(first, list):
            return first + first[-1:] * (grown(len(first), len(second)) - len(first))
        if dataclasses.is_dataclass(first) and not isinstance(first, type):  # moves nothing to the device by itself
            return dataclasses.replace(first, **fields(first, second, on_host=set(vars(first))))
        return first

    def fields(first: Any, second: Any, *, on_host: Collection[str]) -> dict[str, Any]:
        pairs = {name: (value, getattr(second, name)) for name, value in vars(first).items()}
        return {name: sized(*pair, on_host=name in on_host) for name, pair in pairs.items()}

    return dataclasses.replace(prepared[0], **fields(*prepared[:2], on_host=ON_HOST))


def on_meta(value: Any) -> Any:
    """Return a prepared batch on the meta device, except what a loss reads on the host."""
    changed = {
        field.name: tree_map_only(Tensor, lambda tensor: tensor.to(META), getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name not in ON_HOST
    }
    return dataclasses.replace(value, **changed)


def sides_of(values: Iterable[Any]) -> set[int]:
    """Return the lengths of all dimensions of the tensors among some values."""
    return {side for value in values if isinstance(value, Tensor) for side in value.shape if side}
