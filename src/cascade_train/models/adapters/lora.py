"""LoRA: W + (alpha / rank) B A (Hu et al. 2021, equation 3), with DoRA's trained magnitudes (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cascade_train.models.adapters.kind import (
    AdapterKind,
    Init,
    LoraSpec,
    Parts,
    Place,
    Shape,
    common,
    fixed_input,
    padded,
    rescaled,
    strength,
)
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

    name = "lora"
    title = "low-rank"
    prefix = "lora_"
    options = frozenset({"init", "dropout", "dora", "joint_qkv"})
    endings = {  # noqa: RUF012
        ".lora_down.weight": DOWN,
        ".lora_up.weight": UP,
        ".lora_A.weight": DOWN,
        ".lora_B.weight": UP,
        ".alpha": "alpha",
        ".dora_scale": MAGNITUDE,
        ".lora_magnitude_vector": MAGNITUDE,
        ".lora_magnitude_vector.weight": MAGNITUDE,
    }
    program = "networks.lora"
    in_diffusers = True

    def config(self, spec: LoraSpec, *, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoraConfig`, see `AdapterKind.config`."""
        from peft import LoraConfig  # takes seconds

        training = {} if dropout is None else {"lora_dropout": dropout, "init_lora_weights": False}
        return LoraConfig(r=spec.rank, lora_alpha=spec.alpha, use_dora=spec.dora, **training, **options)

    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return A uniform and B zero, or as in the original A zero and B normal; magnitudes become the base's."""
        if init == "original":
            return Fill(kind="normal", scale=1.0) if part == UP else ZEROS
        return torch_uniform(tensor) if part == DOWN else ZEROS

    def shapes(self, spec: LoraSpec, module: Shape) -> dict[str, Shape]:
        """Return A (rank, in, *kernel) and B (out, rank, 1, 1), with DoRA the magnitudes."""
        out, into, *taps = module
        found: dict[str, Shape] = {DOWN: (spec.rank, into, *taps), UP: (out, spec.rank, *(1 for _ in taps))}
        return found | ({MAGNITUDE: (1, out, 1, 1) if taps else (out,)} if spec.dora else {})

    def delta(self, spec: LoraSpec, parts: Parts) -> Tensor:
        """Return (alpha / rank) B A."""
        return spec.scale * (parts[UP].float().flatten(1) @ parts[DOWN].float().flatten(1))

    def change(self, spec: LoraSpec, parts: Parts, weight: Tensor) -> Tensor:
        """Return the change, with DoRA that to outputs of the trained magnitudes."""
        delta = super().change(spec, parts, weight)
        magnitude = parts.get(MAGNITUDE)
        if magnitude is None:
            return delta
        adapted = weight + delta
        return adapted * magnitude_factor(magnitude.float(), adapted) - weight

    def output(self, spec: LoraSpec, parts: Parts) -> Tensor:
        """Return (alpha / rank) B A x for a fixed x, (out,)."""
        down, up = (parts[half].float().flatten(1) for half in (DOWN, UP))
        return spec.scale * (up @ (down @ fixed_input(down.shape[1])))

    def to_file(self, spec: LoraSpec, parts: Parts) -> dict[str, Tensor]:
        """Return kohya's names, with LyCORIS' `dora_scale` (out, 1, ...)."""
        found = {".lora_down.weight": parts[DOWN], ".lora_up.weight": parts[UP], ".alpha": torch.tensor(spec.alpha)}
        if MAGNITUDE in parts:
            found[".dora_scale"] = parts[MAGNITUDE].reshape(-1, *[1] * (parts[UP].ndim - 1))
        return found

    def lacks(self, parts: Parts) -> bool:
        """Return whether a half is missing."""
        return DOWN not in parts or UP not in parts

    def gather(
        self,
        adapters: Mapping[Place, Parts],
        shapes: Mapping[Place, Shape],
        *,
        rank: int | None,
        alpha: float | None,
        origin: str,
    ) -> tuple[dict[str, Any], dict[Place, Parts]]:
        """Fill ranks up with zeros, and multiply other scales into B."""
        strengths = {place: strength(parts, parts[DOWN].shape[0], alpha) for place, parts in adapters.items()}
        whole = common(strengths.values())
        found: dict[Place, Parts] = {}
        for place, parts in adapters.items():
            down, up = padded(parts[DOWN], whole.rank, 0), padded(parts[UP], whole.rank, 1)
            found[place] = {DOWN: down, UP: rescaled(up, strengths[place].scale, whole.scale)}
            if MAGNITUDE in parts:
                shape = (1, -1, 1, 1) if up.ndim == 4 else (-1,)
                found[place] = {**found[place], MAGNITUDE: parts[MAGNITUDE].float().reshape(shape)}
        dora = any(MAGNITUDE in parts for parts in adapters.values())
        return {"rank": whole.rank, "alpha": whole.alpha, "dora": dora}, found
