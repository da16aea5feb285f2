"""LoHa: W + (alpha / rank) (B1 A1) * (B2 A2), a Hadamard product (Hyeon-Woo et al. 2022, FedPara, section 2.2)."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from torch import Tensor

from cascade_train.models.adapters.kind import AdapterKind, Init, LoraSpec, Parts, Shape, Strength
from cascade_train.models.initialize import ZEROS, Fill


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
