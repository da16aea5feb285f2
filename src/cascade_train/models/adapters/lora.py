"""LoRA: W + (alpha / rank) B A (Hu et al. 2021, equation 3), with DoRA's trained magnitudes (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from cascade_train.models.adapters import kind
from cascade_train.models.adapters.kind import LoraSpec, Parts, Shape, Strength
from cascade_train.models.initialize import ZEROS, Fill, torch_uniform

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"


def output_norms(weight: Tensor) -> Tensor:
    """Return the length (out,) fp32 of each output's weights, of (out, ...) (Liu et al. 2024, equation 2)."""
    return weight.detach().float().flatten(1).norm(dim=1)


def magnitude_factor(magnitude: Tensor, weight: Tensor) -> Tensor:
    """Return the factor that gives each output of a weight (out, ...) its magnitude, broadcastable to the weight."""
    return (magnitude.flatten() / output_norms(weight)).view(-1, *[1] * (weight.ndim - 1))


class LoRA(kind.AdapterKind):
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

    def fill(self, part: str, tensor: Tensor, init: kind.Init) -> Fill:
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
        return own.scale * (up @ (down @ kind.fixed_input(down.shape[1])))

    def to_file(self, own: Strength, parts: Parts) -> dict[str, Tensor]:
        """Return kohya's names, with LyCORIS' `dora_scale` (out, 1, ...)."""
        names = {DOWN: ".lora_down.weight", UP: ".lora_up.weight"}
        found = {".alpha": super().to_file(own, {})[".alpha"]} | {names[half]: parts[half] for half in names}
        if MAGNITUDE in parts:
            found[".dora_scale"] = parts[MAGNITUDE].reshape(-1, *[1] * (parts[UP].ndim - 1))
        return found

    def gather(
        self, adapters: Mapping[str, Parts], shapes: Mapping[str, Shape], given: Strength | None, origin: str
    ) -> kind.Gathered:
        """See `AdapterKind.gather`; magnitudes stay as they are."""
        options, found = super().gather(adapters, shapes, given, origin)
        trained = {name: parts[MAGNITUDE].float() for name, parts in adapters.items() if MAGNITUDE in parts}
        for name, magnitude in trained.items():
            found[name][MAGNITUDE] = magnitude.reshape((1, -1, 1, 1) if found[name][UP].ndim == 4 else (-1,))
        return {**options, "dora": bool(trained)}, found
