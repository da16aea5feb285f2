"""The kinds of adapters, by the option of `task.kind`, and what names of tensors say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import regex
import torch
from torch import Tensor

from cascade_train.models.adapters.kind import AdapterKind
from cascade_train.models.adapters.loha import LoHa
from cascade_train.models.adapters.lokr import LoKr
from cascade_train.models.adapters.lora import LoRA

KINDS: Mapping[str, AdapterKind] = {kind.name: kind for kind in (LoRA(), LoKr(), LoHa())}


def split_name(name: str) -> tuple[str, str] | None:
    """Return the module and the part that a tensor of an adapter is named after; None = of none."""
    for kind in KINDS.values():
        module, found, part = name.rpartition(f".{kind.prefix}")
        if found:
            return module, f"{kind.prefix}{part}"
    return None


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name is one of an adapter."""
    return split_name(name) is not None


def by_module(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the parts of each module of a state by plain names, in its order."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if (place := split_name(name)) is not None:
            found.setdefault(place[0], {})[place[1]] = value
    return found


def kind_of(names: Iterable[str]) -> AdapterKind | None:
    """Return the kind of adapters whose parts stored names have, in any spelling; None = none."""
    names = tuple(names)
    for kind in KINDS.values():
        endings = tuple(ending for ending in kind.endings if ending != ".alpha")
        if any(name.endswith(endings) for name in names):
            return kind
    return None


def peft_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `LoraSpec` that a configuration of peft's has."""
    factor = config.get("decompose_factor", -1)
    return {
        "kind": config["peft_type"].lower(),
        "rank": int(config["r"]),
        "alpha": float(_alpha(config)),
        "dora": bool(config.get("use_dora")),
        "factor": None if factor == -1 else factor,
    }


def _alpha(config: Mapping[str, Any]) -> Any:
    return config["lora_alpha"] if "lora_alpha" in config else config["alpha"]


def peft_alphas(tensors: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return `.alpha` of each module under a prefix, by peft's configuration (peft, tuners/lora/model.py).

    None of a kind whose tensors do not tell ranks.
    """
    alphas, own, kind = dict[str, Tensor](), config.get("alpha_pattern") or {}, kind_of(tensors)
    if kind is None or not kind.factors:
        return alphas
    below = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    for module, parts in by_module(below).items():
        found = (each for each in own if regex.fullmatch(rf"(.*\.)?({each})", module, timeout=1.0))
        alpha = float(own.get(next(found, None), _alpha(config)))
        if config.get("use_rslora"):
            alpha *= math.sqrt(kind.rank(parts))  # whose scale is alpha / sqrt(rank)
        alphas[f"{prefix}{module}.alpha"] = torch.tensor(alpha, dtype=torch.float64)
    return alphas
