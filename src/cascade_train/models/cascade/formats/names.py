"""Names of Stable Cascade's tensors, diffusers' and the original's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cascade_train.models.family import Stored

_FUSED = {"attn.in_proj_weight": "weight", "attn.in_proj_bias": "bias"}


def map_keys(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Lay out a denoising network that is stored under diffusers' names or the original's.

    The original fuses q, k and v in `in_proj` and calls Stage B's pooled text mapper `clip_mapper`
    (Stable Cascade, modules/common.py and modules/stage_b.py).
    """
    mapped: dict[str, Stored] = {}
    for name in stored_names:
        fused = next((old for old in _FUSED if name.endswith(old)), None)
        if fused is None:
            ours = re.sub(r"^clip_mapper\.", "clip_txt_pooled_mapper.", name)
            mapped[ours.replace("attn.out_proj.", "to_out.0.")] = Stored(name)
            continue
        stem = name.removesuffix(fused)
        for third, projection in enumerate(("to_q", "to_k", "to_v")):
            mapped[f"{stem}{projection}.{_FUSED[fused]}"] = Stored(name, third)
    return mapped


def foreign_names(names: Iterable[str]) -> dict[str, str]:
    """Return what the original calls the modules or tensors of a network, q, k and v apart, as adapters name them."""
    names = list(names)
    is_stage_b = not any(name.startswith("clip_txt_mapper") for name in names)
    found = {}
    for name in names:
        there = name.replace(".attention.to_", ".attention.attn.to_").replace(".attn.to_out.0", ".attn.out_proj")
        found[name] = re.sub("^clip_txt_pooled_mapper", "clip_mapper", there) if is_stage_b else there
    return found


def original_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors under the original's names, q, k and v in one; the others share memory.

    The inverse of `map_keys`; in the original's order except for the mappers of the conditions.
    """
    found: dict[str, Tensor] = {}
    for name, there in foreign_names(state).items():
        stem, _, leaf = there.partition("attn.to_q.")
        if leaf:
            found[f"{stem}attn.in_proj_{leaf}"] = torch.cat([state[name.replace("to_q", f"to_{p}")] for p in "qkv"])
        elif ".attn.to_" not in there:
            found[there] = state[name].contiguous()
    return found
