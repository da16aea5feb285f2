"""Adapters in the original's layout: positions instead of names, alpha 1, q, k and v adapted jointly.

The original writes `weights.<i>.lora_down` (r, in) and `weights.<i>.lora_up` (out, r), i counting the adapted modules
in its own order, for W + (1 / r) up down; and `embeddings.embeddings` (N, D), which it adds to the vocabulary's rows
`embeddings.indices` (Stable Cascade, modules/lora.py and train/train_c_lora.py).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.family import Shape
from cascade_train.models.formats.weights import write_tensors
from cascade_train.models.lora import LoraSpec, StoredLora, TrainedTokens

log = logging.getLogger(__name__)

_POSITION = re.compile(r"weights\.(\d+)\.lora_(down|up)")
_SWAPPED = {"clip_txt_pooled_mapper": "clip_txt_mapper", "clip_txt_mapper": "clip_txt_pooled_mapper"}
"""The only modules whose order diffusers changes."""

_BRACKETED = re.compile(r"\[.*]|<.*>", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """One module of the original: its name there, and ours (three where q, k and v are one there)."""

    name: str
    ours: tuple[str, ...]


def is_original(names: Iterable[str]) -> bool:
    """Return whether stored names are those of the original's layout."""
    return any(_POSITION.fullmatch(name) for name in names)


def original_places(modules: Iterable[str], filters: Sequence[str] | None) -> list[Place]:
    """Return the original's modules that its filters select, in its order.

    A filter is a substring of the original's name; None = every module. `modules` are in the network's order.
    """
    places: list[Place] = []
    names = list(modules)
    swaps = set(_SWAPPED) <= set(names)
    for name in (_SWAPPED.get(name, name) if swaps else name for name in names):
        stem, _, leaf = name.rpartition(".attention.")
        if leaf == "to_q":
            fused = f"{stem}.attention.attn"
            places.append(Place(f"{fused}.out_proj", (f"{stem}.attention.to_out.0",)))
            places.append(Place(fused, tuple(f"{stem}.attention.to_{each}" for each in "qkv")))
        elif not leaf or not stem:
            places.append(Place(name, (name,)))
    return places if filters is None else [p for p in places if any(f in p.name for f in filters)]


def read_original(
    header: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, Shape],
    filters: Sequence[str] | None,
    origin: str,
) -> StoredLora:
    """Read the original's layout as adapters of q, k and v that share their down half.

    A file of ours names its modules in the header. The original's own does not: `filters` must be the `module_filters`
    that it was trained with, else a ConfigError. `modules` are the shapes of the network's weights, in its order.
    """
    count = 1 + max(int(match[1]) for name in tensors if (match := _POSITION.fullmatch(name)) is not None)
    places = original_places(modules, None if "modules" in header else filters)
    if "modules" in header:
        named = {place.name: place for place in places}
        places = [named[name] for name in json.loads(header["modules"]) if name in named]
    if len(places) != count:
        raise ConfigError(
            f"{origin}: adapts {count} modules, but module_filters={json.dumps(filters)} selects {len(places)} of this "
            "model; give the filters and the model that it was trained with"
        )
    state: dict[str, Tensor] = {}
    for index, place in enumerate(places):
        down, up = (tensors[f"weights.{index}.lora_{half}"].float() for half in ("down", "up"))
        state |= _split(place, down, up, modules, origin)
    rank = tensors["weights.0.lora_down"].shape[0]
    spec = LoraSpec(rank=rank, alpha=1.0, targets=tuple(n for p in places for n in p.ours), base_size=None)
    tokens = _read_tokens(header, tensors, origin)
    return StoredLora(spec=spec, state=state, tokens={} if tokens is None else {"text_encoder": tokens})


def _split(place: Place, down: Tensor, up: Tensor, modules: Mapping[str, Shape], origin: str) -> dict[str, Tensor]:
    """Return one of the original's adapters as ours; kernels larger than 1 get the same values on every tap."""
    state: dict[str, Tensor] = {}
    for name, rows in zip(place.ours, up.chunk(len(place.ours)), strict=True):
        shape = modules[name]
        if len(shape) == 4 and shape[1] == 1 and shape[0] > 1:
            raise ConfigError(f"{origin}: adapts the depthwise layer {name}, which has no counterpart here")
        if (rows.shape[0], down.shape[1]) != tuple(shape[:2]):
            raise ConfigError(
                f"{origin}: the adapter of {place.name} is for {rows.shape[0]} x {down.shape[1]}, this model has "
                f"{shape[0]} x {shape[1]}; choose the model= and the module_filters it was trained with"
            )
        taps = shape[2:]
        a = down if not taps else down[:, :, None, None].expand(-1, -1, *taps)
        b = rows if not taps else rows[:, :, None, None]
        state |= {f"{name}.lora_A.weight": a.clone(), f"{name}.lora_B.weight": b.clone()}
    return state


def _read_tokens(header: Mapping[str, str], tensors: Mapping[str, Tensor], origin: str) -> TrainedTokens | None:
    rows = tensors.get("embeddings.embeddings")
    if rows is None or not len(rows):
        return None
    if "tokens" not in header:
        what = "trained tokens are left out: they are stored as differences, without their names"
        log.warning("%s: its %d %s.", origin, len(rows), what)
        return None
    strings = tuple(json.loads(header["tokens"]))
    ids = tuple(int(each) for each in tensors["embeddings.indices"])
    return TrainedTokens(strings=strings, ids=ids, is_new=(True,) * len(strings), rows=rows.float())


def write_original(path: Path, lora: StoredLora, modules: Mapping[str, Shape], facts: Mapping[str, str]) -> None:
    """Write adapters as the original reads them, exactly: independent q, k and v need three times the rank.

    Every adapter of the file has the same rank, as the original asks; load it with `rank` and `module_filters` as in
    the header, and with `train_tokens: [[<token>, null], …]`. A ConfigError where the original has no place.
    """
    if (reason := _inexpressible(lora, modules)) is not None:
        raise ConfigError(f"the original's layout has no place for {reason}; choose another format")
    places = [p for p in original_places(modules, None) if any(f"{n}.lora_A.weight" in lora.state for n in p.ours)]
    joined = [_join(place, lora, modules) for place in places]
    rank = max(down.shape[0] for down, _ in joined)
    tensors: dict[str, Tensor] = {}
    for index, (down, up) in enumerate(joined):
        missing = rank - down.shape[0]
        tensors[f"weights.{index}.lora_down"] = torch.cat([down, down.new_zeros(missing, down.shape[1])])
        tensors[f"weights.{index}.lora_up"] = rank * torch.cat([up, up.new_zeros(up.shape[0], missing)], dim=1)
    header = {"rank": str(rank), "alpha": "1", "modules": json.dumps([place.name for place in places])}
    for tokens in lora.tokens.values():
        tensors["embeddings.embeddings"] = tokens.rows.contiguous()
        tensors["embeddings.indices"] = torch.tensor(tokens.ids)
        header["tokens"] = json.dumps(tokens.strings)
    write_tensors(path, tensors, {**facts, **header, "base_size": lora.spec.base_size or ""})


def _inexpressible(lora: StoredLora, modules: Mapping[str, Shape]) -> str | None:
    """Return what of an adapter the original's layout has no place for; None = nothing."""
    if lora.spec.kind != "lora":
        return f"adapters of another kind (task.kind={lora.spec.kind})"
    if lora.spec.dora:
        return "weights that are decomposed (dora)"
    if len(lora.by_root()) > 1:
        return "adapters of the text encoder"
    if any(max(modules[name][2:], default=1) > 1 for name in lora.spec.targets):
        return "convolutions that are larger than one pixel"
    tokens = lora.tokens.values()
    if not all(is_new for each in tokens for is_new in each.is_new):
        return "tokens that the vocabulary held before"
    if not all(_BRACKETED.fullmatch(string) for each in tokens for string in each.strings):
        return "new tokens without brackets such as [name]"
    return None


def _join(place: Place, lora: StoredLora, modules: Mapping[str, Shape]) -> tuple[Tensor, Tensor]:
    """Return (down, up) of one of the original's modules, alpha / rank multiplied into up."""
    downs, ups = [], []
    for name in place.ours:
        out, into = modules[name][:2]
        a, b = (lora.state.get(f"{name}.lora_{half}.weight") for half in ("A", "B"))
        downs.append(torch.zeros(0, into) if a is None else a.float().flatten(1))
        ups.append(torch.zeros(out, 0) if b is None else lora.spec.of(name).scale * b.float().flatten(1))
    if all(each.shape == downs[0].shape and torch.equal(each, downs[0]) for each in downs):
        return downs[0], torch.cat(ups)
    return torch.cat(downs), torch.block_diag(*ups)
