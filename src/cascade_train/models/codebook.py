"""What keeps a codebook in use: counting its entries, and giving dead ones new places.

Every function gives the same result on every rank for the same arguments, sends nothing and waits for no device.

Shape legend: G candidates, C latent channels, K entries of the codebook.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def count_codes(index: Tensor, entries: int) -> Tensor:
    """Return how often each of the `entries` codes occurs among the numbers `index`, (K,) fp32."""
    flat = index.flatten()
    return torch.zeros(entries, device=flat.device).index_add_(0, flat, torch.ones(len(flat), device=flat.device))


def unused_since(unused_K: Tensor, count_K: Tensor) -> Tensor:
    """Return for how many steps each code has not been chosen, (K,) int64, after a step that chose it so often."""
    return torch.where(count_K > 0, 0, unused_K + 1)


@torch.no_grad()
def revive(weight: nn.Parameter, unused_K: Tensor, candidate_GC: Tensor, *, after_steps: int) -> Tensor:
    """Put candidates in the place of codes that nobody has chosen for `after_steps` steps, the lowest numbers first.

    The i-th dead code takes the i-th candidate; where there are more dead codes than candidates, the others wait.

    Args:
        weight: (K, C) the codebook, whole or this rank's shard of it.
        unused_K: (K,) int64, for how many steps each code has not been chosen.
        candidate_GC: (G, C) fp32 latents of the step's global batch, equal on all ranks.
        after_steps: steps.

    Returns:
        `unused_K`, 0 for codes that were replaced.
    """
    dead_K = unused_K >= after_steps
    place_K = dead_K.long().cumsum(0) - 1
    replaced_K = dead_K & (place_K < len(candidate_GC))
    rows_KC = candidate_GC[place_K.clamp(0, len(candidate_GC) - 1)]
    mine_K1, rows = (_own_rows(weight, whole) for whole in (replaced_K[:, None].to(rows_KC.dtype), rows_KC))
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    local.copy_(torch.where(mine_K1 > 0, rows.to(local.dtype), local))
    return torch.where(replaced_K, 0, unused_K)


def _own_rows(weight: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that every rank has whole; nothing is sent."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
