"""Names of Stable Cascade's tensors, diffusers' and the original's, and the published sizes by their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cascade_train.models.family import Shape, Stored

SIZES = {"c_3b": "Stage C 3.6B", "c_1b": "Stage C 1B", "b_3b": "Stage B 3B", "b_700m": "Stage B 700M"}
"""What each published size is called, by the `model=` that fits it."""

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
            mapped[_rename(name)] = Stored(name)
            continue
        stem = name.removesuffix(fused)
        for third, projection in enumerate(("to_q", "to_k", "to_v")):
            mapped[f"{stem}{projection}.{_FUSED[fused]}"] = Stored(name, third)
    return mapped


def _rename(name: str) -> str:
    return re.sub(r"^clip_mapper\.", "clip_txt_pooled_mapper.", name).replace("attn.out_proj.", "to_out.0.")


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


def recognise_size(shapes: Mapping[str, Shape]) -> str | None:
    """Return the `model=` name of a published size; None = another size.

    Sizes of Stage C differ in the rows of `clip_txt_mapper`, those of Stage B in the width of level 1
    (diffusers, loaders/single_file_utils.py).
    """
    text = shapes.get("clip_txt_mapper.weight")
    if text is not None:
        return {2048: "c_3b", 1536: "c_1b"}.get(text[0])
    width = shapes.get("down_blocks.1.0.channelwise.0.weight")
    return None if width is None else {640: "b_3b", 576: "b_700m"}.get(width[-1])


def recognise_adapter_size(shapes: Iterable[Shape]) -> tuple[str | None, int]:
    """Return the `model=` name of the size whose widths stored adapters have, and the width that tells it.

    The widest level of Stage C is 2048 or 1536 wide, that of Stage B 1152 or 1280. (None, 0) = no published width.
    """
    widths = {width for shape in shapes for width in shape[:2]}
    sizes = {2048: "c_3b", 1536: "c_1b", 1152: "b_700m", 1280: "b_3b"}
    return next(((size, width) for width, size in sizes.items() if width in widths), (None, 0))
