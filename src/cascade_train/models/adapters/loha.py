"""LoHa: W + (alpha / rank) (B1 A1) * (B2 A2), a Hadamard product (Hyeon-Woo et al. 2022, FedPara, section 2.2)."""

from __future__ import annotations

import math
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
    padded,
    rescaled,
    strength,
)
from cascade_train.models.initialize import ZEROS, Fill

PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
"""B1 (out, rank), A1 (rank, in * kernel), B2 and A2."""


class LoHa(AdapterKind):
    """Hadamard products of two low-rank products, whose rank is up to rank^2; the same tensors in peft and LyCORIS."""

    name = "loha"
    title = "LoHa"
    prefix = "hada_"
    endings = {f".{part}": part for part in (*PARTS, "alpha")}  # noqa: RUF012

    def config(self, spec: LoraSpec, *, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoHaConfig`, see `AdapterKind.config`."""
        from peft import LoHaConfig  # takes seconds

        return LoHaConfig(r=spec.rank, alpha=spec.alpha, init_weights=dropout is None, **options)

    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return the values of LyCORIS (modules/loha.py): B1 N(0, 0.1), A1 and A2 N(0, 1), B2 zero."""
        scales = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
        return Fill(kind="normal", scale=scales[part]) if part in scales else ZEROS

    def shapes(self, spec: LoraSpec, module: Shape) -> dict[str, Shape]:
        """Return those of the two products, each of the weight's shape with its kernel flattened."""
        up, down = (module[0], spec.rank), (spec.rank, math.prod(module[1:]))
        return dict(zip(PARTS, (up, down, up, down), strict=True))

    def delta(self, spec: LoraSpec, parts: Parts) -> Tensor:
        """Return (alpha / rank) (B1 A1) * (B2 A2)."""
        up1, down1, up2, down2 = (parts[part].float() for part in PARTS)
        return spec.scale * ((up1 @ down1) * (up2 @ down2))

    def to_file(self, spec: LoraSpec, parts: Parts) -> dict[str, Tensor]:
        """Return LyCORIS' names."""
        return {f".{part}": parts[part] for part in PARTS} | {".alpha": torch.tensor(spec.alpha)}

    def lacks(self, parts: Parts) -> bool:
        """Return whether one of the four factors is missing."""
        return any(part not in parts for part in PARTS)

    def gather(
        self,
        adapters: Mapping[Place, Parts],
        shapes: Mapping[Place, Shape],
        *,
        rank: int | None,
        alpha: float | None,
        origin: str,
    ) -> tuple[dict[str, Any], dict[Place, Parts]]:
        """Fill ranks up with zeros, and multiply other scales into B1."""
        strengths = {place: strength(parts, parts[PARTS[1]].shape[0], alpha) for place, parts in adapters.items()}
        whole = common(strengths.values())
        found: dict[Place, Parts] = {}
        for place, parts in adapters.items():
            up1, down1, up2, down2 = (padded(parts[part], whole.rank, 1 - i % 2) for i, part in enumerate(PARTS))
            up1 = rescaled(up1, strengths[place].scale, whole.scale)
            found[place] = dict(zip(PARTS, (up1, down1, up2, down2), strict=True))
        return {"rank": whole.rank, "alpha": whole.alpha}, found
