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


def original_layout(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the original's name of each tensor -> diffusers' names of the parts whose rows make it up.

    The inverse of `map_keys`; in the original's order except for the mappers of the conditions.
    """
    names = list(names)
    is_stage_b = "clip_txt_mapper.weight" not in names
    layout: dict[str, tuple[str, ...]] = {}
    for name in names:
        stem, found, leaf = name.partition(".attention.to_q.")
        if found:
            layout[f"{stem}.attention.attn.in_proj_{leaf}"] = tuple(f"{stem}.attention.to_{p}.{leaf}" for p in "qkv")
        elif ".attention.to_k." in name or ".attention.to_v." in name:
            continue
        elif is_stage_b and name.startswith("clip_txt_pooled_mapper."):
            layout["clip_mapper." + name.removeprefix("clip_txt_pooled_mapper.")] = (name,)
        else:
            layout[name.replace(".attention.to_out.0.", ".attention.attn.out_proj.")] = (name,)
    return layout


def original_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors under the original's names, q, k and v in one; the others share memory."""
    return {
        name: (torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]).contiguous()
        for name, parts in original_layout(state).items()
    }


def foreign_names(modules: Iterable[str]) -> dict[str, str]:
    """Return what the original's networks call the modules of a network, q, k and v apart, as adapters name them."""
    modules = list(modules)
    is_stage_b = "clip_txt_mapper" not in modules
    found = {}
    for name in modules:
        there = name.replace(".attention.to_out.0", ".attention.attn.out_proj")
        there = there.replace(".attention.to_", ".attention.attn.to_")
        found[name] = "clip_mapper" if is_stage_b and name == "clip_txt_pooled_mapper" else there
    return found
