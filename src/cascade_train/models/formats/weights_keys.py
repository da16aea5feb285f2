"""What the names and shapes of stored tensors mean: sizes of the cascade, and the original's key names.

Lives here: pure functions over names and shapes. Must not live here: reading files (formats/weights_tensors.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]

SIZES = {
    "c_3b": "Stage C 3.6B",
    "c_1b": "Stage C 1B",
    "b_3b": "Stage B 3B",
    "b_700m": "Stage B 700M",
}
"""What each published size is called, by the `model=` that fits it."""

_FUSED = {"attn.in_proj_weight": "weight", "attn.in_proj_bias": "bias"}
_RENAMED = {"attn.out_proj.": "to_out.0."}


@dataclass(frozen=True)
class Stored:
    """Where a tensor of the network lies: a stored name and, for fused projections, which third of its rows."""

    name: str
    third: int | None = None


def recognise_size(shapes: Mapping[str, Shape]) -> str | None:
    """Return the `model=` name of a published size, told from two shapes; None = another size.

    The rows of `clip_txt_mapper` tell Stage C's sizes, the width of level 1 tells Stage B's
    (diffusers, loaders/single_file_utils.py).
    """
    text = shapes.get("clip_txt_mapper.weight")
    if text is not None:
        return {2048: "c_3b", 1536: "c_1b"}.get(text[0])
    width = shapes.get("down_blocks.1.0.channelwise.0.weight")
    if width is None:
        return None
    return {640: "b_3b", 576: "b_700m"}.get(width[-1])


def map_keys(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Return diffusers' name of each stored tensor, whether it is stored under diffusers' or the original's names.

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
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    if name.startswith("clip_mapper."):
        return "clip_txt_pooled_mapper." + name.removeprefix("clip_mapper.")
    return name


def compare_keys(wanted: Iterable[str], found: Iterable[str], *, limit: int = 3) -> str | None:
    """Return what is missing and unexpected, the first few of each in order; None = the sets are equal."""
    wanted, found = list(wanted), list(found)
    have, want = set(found), set(wanted)
    parts = []
    for title, names in (
        ("missing", [name for name in wanted if name not in have]),
        ("unexpected", [name for name in found if name not in want]),
    ):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{len(names)} {title}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts) or None


def recognise_adapter_size(shapes: Iterable[Shape]) -> tuple[str | None, int]:
    """Return the `model=` name of the size whose widths stored adapters have, and the width that tells it.

    The widest level of Stage C is 2048 or 1536 wide, that of Stage B 1152 or 1280. (None, 0) = no published width.
    """
    widths = {width for shape in shapes for width in shape[:2]}
    sizes = {2048: "c_3b", 1536: "c_1b", 1152: "b_700m", 1280: "b_3b"}
    return next(((size, width) for width, size in sizes.items() if width in widths), (None, 0))


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
