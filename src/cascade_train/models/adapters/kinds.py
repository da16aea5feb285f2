"""The kinds of adapters, by the option of `task.kind`, and what names of tensors say.

LoRA: W + (alpha / rank) B A (Hu et al. 2021, equation 3), with DoRA's trained magnitudes (Liu et al. 2024). LoHa:
W + (alpha / rank) (B1 A1) * (B2 A2), a Hadamard product (Hyeon-Woo et al. 2022, FedPara, section 2.2). LoKr: lokr.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import regex
import torch
from torch import Tensor

from cascade_train.models.adapters import kind as base
from cascade_train.models.adapters.kind import AdapterKind, Init, LoraSpec, Parts, Shape, Strength
from cascade_train.models.adapters.lokr import LoKr
from cascade_train.models.initialize import ZEROS, Fill, torch_uniform

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"


def output_norms(weight: Tensor) -> Tensor:
    """Return the length (out,) fp32 of each output's weights, of (out, ...) (Liu et al. 2024, equation 2)."""
    return weight.detach().float().flatten(1).norm(dim=1)


def magnitude_factor(magnitude: Tensor, weight: Tensor) -> Tensor:
    """Return the factor that gives each output of a weight (out, ...) its magnitude, broadcastable to the weight."""
    return (magnitude.flatten() / output_norms(weight)).view(-1, *[1] * (weight.ndim - 1))


class LoRA(AdapterKind):
    """Low-rank adapters."""

    name, title, prefix = "lora", "low-rank", "lora_"
    options = frozenset({"init", "dropout", "dora", "joint_qkv", "ranks"})
    factors = MappingProxyType({UP: 1, DOWN: 0})
    endings = MappingProxyType(
        {
            ".lora_down.weight": DOWN,
            ".lora_up.weight": UP,
            **{f".{part}": part for part in (DOWN, UP, MAGNITUDE, "alpha")},
            **{".dora_scale": MAGNITUDE, ".lora_magnitude_vector": MAGNITUDE},
        }
    )

    def config(self, spec: LoraSpec, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoraConfig`, see `AdapterKind.config`."""
        from peft import LoraConfig  # takes seconds

        training = {} if dropout is None else {"lora_dropout": dropout, "init_lora_weights": False}
        return LoraConfig(r=spec.rank, lora_alpha=spec.alpha, use_dora=spec.dora, **training, **options)

    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return A uniform and B zero, or as in the original A zero and B normal; magnitudes become the base's."""
        if init == "original":
            return Fill(kind="normal", scale=1.0) if part == UP else ZEROS
        return torch_uniform(tensor) if part == DOWN else ZEROS

    def shapes(self, spec: LoraSpec, rank: int, module: Shape) -> dict[str, Shape]:
        """Return A (rank, in, *kernel) and B (out, rank, 1, 1), with DoRA the magnitudes."""
        out, into, *taps = module
        found: dict[str, Shape] = {DOWN: (rank, into, *taps), UP: (out, rank, *(1 for _ in taps))}
        return found | ({MAGNITUDE: (1, out, 1, 1) if taps else (out,)} if spec.dora else {})

    def delta(self, own: Strength, parts: Parts) -> Tensor:
        """Return (alpha / rank) B A."""
        return own.scale * (parts[UP].float().flatten(1) @ parts[DOWN].float().flatten(1))

    def change(self, own: Strength, parts: Parts, weight: Tensor) -> Tensor:
        """Return the delta; with DoRA the change to outputs of the trained magnitudes."""
        delta = super().change(own, parts, weight)
        if MAGNITUDE not in parts:
            return delta
        adapted = weight + delta
        return adapted * magnitude_factor(parts[MAGNITUDE].float(), adapted) - weight

    def output(self, own: Strength, parts: Parts) -> Tensor:
        """Return (alpha / rank) B A x for a fixed x, (out,)."""
        down, up = (parts[half].float().flatten(1) for half in (DOWN, UP))
        return own.scale * (up @ (down @ base.fixed_input(down.shape[1])))

    def to_file(self, own: Strength, parts: Parts) -> dict[str, Tensor]:
        """Return kohya's names, with LyCORIS' `dora_scale` (out, 1, ...)."""
        names = {DOWN: ".lora_down.weight", UP: ".lora_up.weight"}
        found = {".alpha": super().to_file(own, {})[".alpha"]} | {names[half]: parts[half] for half in names}
        if MAGNITUDE in parts:
            found[".dora_scale"] = parts[MAGNITUDE].reshape(-1, *[1] * (parts[UP].ndim - 1))
        return found

    def gather(
        self, adapters: Mapping[str, Parts], shapes: Mapping[str, Shape], given: Strength | None, origin: str
    ) -> base.Gathered:
        """See `AdapterKind.gather`; magnitudes stay as they are."""
        options, found = super().gather(adapters, shapes, given, origin)
        trained = {name: parts[MAGNITUDE].float() for name, parts in adapters.items() if MAGNITUDE in parts}
        for name, magnitude in trained.items():
            found[name][MAGNITUDE] = magnitude.reshape((1, -1, 1, 1) if found[name][UP].ndim == 4 else (-1,))
        return {**options, "dora": bool(trained)}, found


class LoHa(AdapterKind):
    """Hadamard products of two low-rank products, whose rank is up to rank^2; the same tensors in peft and LyCORIS.

    B1, A1, B2 and A2 are `hada_w1_a` (out, rank), `hada_w1_b` (rank, in * kernel), `hada_w2_a` and `hada_w2_b`.
    """

    name, title, prefix = "loha", "LoHa", "hada_"
    options = frozenset({"ranks"})
    factors = MappingProxyType({"hada_w1_a": 1, "hada_w1_b": 0, "hada_w2_a": 1, "hada_w2_b": 0})
    endings = MappingProxyType({f".{part}": part for part in (*factors, "alpha")})

    def config(self, spec: LoraSpec, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoHaConfig`, see `AdapterKind.config`."""
        from peft import LoHaConfig  # takes seconds

        return LoHaConfig(r=spec.rank, alpha=spec.alpha, init_weights=dropout is None, **options)

    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return the values of LyCORIS (modules/loha.py): B1 N(0, 0.1), A1 and A2 N(0, 1), B2 zero."""
        scales = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
        return Fill(kind="normal", scale=scales[part]) if part in scales else ZEROS

    def shapes(self, spec: LoraSpec, rank: int, module: Shape) -> dict[str, Shape]:
        """Return those of the two products, each of the weight's shape with its kernel flattened."""
        up, down = (module[0], rank), (rank, math.prod(module[1:]))
        return {part: up if dim else down for part, dim in self.factors.items()}

    def delta(self, own: Strength, parts: Parts) -> Tensor:
        """Return (alpha / rank) (B1 A1) * (B2 A2)."""
        up1, down1, up2, down2 = (parts[part].float() for part in self.factors)
        return own.scale * ((up1 @ down1) * (up2 @ down2))


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
