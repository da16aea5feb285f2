"""A batch of samples and the random draws that belong to them.

Lowest layer: data makes batches, tasks consume them, neither sees the other.

Shape legend: B batch, C channels, H W image size in pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cascade_train.redaction import LONGEST_NAME, LONGEST_REASON, shortened

SampleTransform = Callable[[np.ndarray, torch.Generator], Mapping[str, np.ndarray]]
"""Makes further arrays of a sample, by name, from its picture, (3, H, W) uint8 RGB as it enters the batch.

Runs in the data workers with the sample's own CPU generator: it must be picklable and stay off the accelerator.
Arrays of pictures of one size have one shape and dtype.
"""

_SMALL_BYTES = 32 * 1024


def sample_seed(seed: int, epoch: int, index: int, purpose: str) -> int:
    """63-bit generator seed of one random choice about one sample.

    A frozen function of its arguments: ranks, workers, micro-batches and resumes do not change it.
    """
    text = f"{seed}/{epoch}/{index}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Unreadable(NamedTuple):
    """Name (shard and key) of a sample that could not be used, and the reason; as text both are shortened."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{shortened(self.name, LONGEST_NAME)} ({shortened(self.reason, LONGEST_REASON)})"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one shape, on the host or on a device.

    Attributes:
        image_BCHW: (B, 3, H, W) uint8 RGB in [0, 255]; None where `tensors` come from a cache in its place.
        captions: B strings, without dropout.
        keys: B names of the samples' origins, for messages.
        epoch_B: (B,) int64 on the host, the epoch in which each sample was drawn.
        index_B: (B,) int64 on the host, the row of each sample in the index of the data.
        weight_B: (B,) fp32 on the host, the weight of each sample's loss; None = 1 each.
        tensors: further tensors of the samples, (B, ...) each, by name: from the task's `SampleTransform` or a cache,
            or `mask`, (B, 1, H, W) uint8, 255 where the loss counts; from a cache, fp32 of the latents' size in [0, 1].
        original_size_B2: (B, 2) int64 on the host, height and width in pixels before cropping, upright; None = unknown.
        crop_B4: (B, 4) int64 on the host, top, left, height and width of the crop in the original's pixels; None =
            unknown.
        flipped_B: (B,) bool on the host, whether the crop was then mirrored left to right; None = none was.
        skipped: unreadable samples that others in this batch replace.
    """

    image_BCHW: Tensor | None
    captions: tuple[str, ...]
    keys: tuple[str, ...]
    epoch_B: Tensor
    index_B: Tensor
    seed: int
    weight_B: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    original_size_B2: Tensor | None = None
    crop_B4: Tensor | None = None
    flipped_B: Tensor | None = None
    skipped: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        return len(self.captions)

    def to(self, device: torch.device) -> Batch:
        """Batch with its image and further tensors on `device`; identities stay on the host."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Batch with its image and further tensors in pinned memory (called by torch's DataLoader)."""
        return self._moved(Tensor.pin_memory)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle small tensors by value: shared memory takes more than a millisecond for each."""
        return {name: _by_value(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: _as_tensors(value) for name, value in state.items()})

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        tensors = {name: move(tensor) for name, tensor in self.tensors.items()}
        image_BCHW = None if self.image_BCHW is None else move(self.image_BCHW)
        return replace(self, image_BCHW=image_BCHW, tensors=tensors)

    def generators(self, purpose: str) -> list[torch.Generator]:
        """One CPU generator per sample, seeded by (run seed, epoch, index, purpose)."""
        return [
            torch.Generator().manual_seed(sample_seed(self.seed, epoch, index, purpose))
            for epoch, index in zip(self.epoch_B.tolist(), self.index_B.tolist(), strict=True)
        ]

    def uniform(self, purpose: str) -> Tensor:
        """Draw (B,) fp32 on the host, uniform in [0, 1), one number per sample."""
        return torch.cat([torch.rand(1, generator=g) for g in self.generators(purpose)])

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Draw (B, *shape) fp32 on the host, standard normal, one draw per sample."""
        return torch.stack([torch.randn(*shape, generator=g) for g in self.generators(purpose)])


def _by_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _by_value(item) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.is_cuda or value.dtype == torch.bfloat16 or value.nbytes > _SMALL_BYTES:
        return value
    return value.numpy()


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_tensors(item) for name, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
