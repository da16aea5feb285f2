"""A batch of samples and the random draws that belong to them.

Lowest layer: data makes batches, tasks consume them, neither sees the other.

Shape legend: B batch, C channels, H W image size in pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def sample_seed(seed: int, epoch: int, index: int, purpose: str) -> int:
    """Return the 63-bit generator seed of one random choice about one sample.

    A frozen function of its arguments: ranks, workers, micro-batches and resumes do not change it.
    """
    text = f"{seed}/{epoch}/{index}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one shape, on the host or on a device.

    Attributes:
        image_BCHW: (B, 3, H, W) uint8 RGB in [0, 255].
        captions: B strings, without dropout.
        keys: B names of where each sample came from, for messages.
        epoch_B: (B,) int64 on the host, the epoch in which each sample was drawn.
        index_B: (B,) int64 on the host, the row of each sample in the index of the data.
        seed: the run's seed.
        weight_B: (B,) fp32 on the host, the weight of each sample's loss; None = 1 each.
        skipped: names of unreadable samples that others in this batch stand in for.
    """

    image_BCHW: Tensor
    captions: tuple[str, ...]
    keys: tuple[str, ...]
    epoch_B: Tensor
    index_B: Tensor
    seed: int
    weight_B: Tensor | None = None
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.captions)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its image on `device`; identities stay on the host."""
        return replace(self, image_BCHW=self.image_BCHW.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch with its image in pinned memory (called by torch's DataLoader)."""
        return replace(self, image_BCHW=self.image_BCHW.pin_memory())

    def generators(self, purpose: str) -> list[torch.Generator]:
        """Return one CPU generator per sample, seeded by (run seed, epoch, index, purpose)."""
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
