"""The first values of adapters (case train_steps_lora, whose variant p2 holds those that the original drew)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.parity_networks import build_network
from cascade_train.models.adapters.kind import Init
from cascade_train.models.lora import ADAPTER, adapted_layers, inject_lora


class TestFirstValues:
    case = "train_steps_lora"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return not variant.inputs["lora.weights.0.lora_down"].any()

    def ours(self, variant: Any, init: Init) -> tuple[Tensor, Tensor]:
        weights = {n.removeprefix("gen."): v for n, v in variant.weights.items() if n.startswith("gen.")}
        network = build_network(variant.args["ctor"], weights)
        rank, filters = variant.args["rank"], variant.args["filters"]
        inject_lora(network, rank=rank, alpha=1.0, dropout=0.0, module_filters=filters, seed=0, init=init)
        layers = [layer for _, layer in adapted_layers(network)]
        halves = ([getattr(layer, f"lora_{half}")[ADAPTER].weight.flatten() for layer in layers] for half in "AB")
        down, up = (torch.cat(each).detach() for each in halves)
        return down, up

    def theirs(self, variant: Any, half: str) -> Tensor:
        found = [value.flatten() for name, value in variant.inputs.items() if name.endswith(f".{half}")]
        return torch.cat(found)

    def test_ours_are_those_of_the_original(self, variant: Any) -> None:
        down, up = self.ours(variant, "original")
        assert torch.equal(down.unique(), self.theirs(variant, "lora_down").unique())
        theirs = self.theirs(variant, "lora_up")
        assert len(up) == len(theirs) > 1000
        assert largest_distance(up, theirs) < 1.95 * (2 / len(up)) ** 0.5  # Kolmogorov and Smirnov, p = 0.001

    def test_the_default_ones_are_not(self, variant: Any) -> None:
        down, up = self.ours(variant, "kaiming")
        assert down.any()
        assert largest_distance(up, self.theirs(variant, "lora_up")) > 0.4

    def test_there_is_one(self, variant_count: int) -> None:
        assert variant_count == 1


def largest_distance(first: Tensor, second: Tensor) -> float:
    """Return the largest distance between two empirical distribution functions."""
    places = torch.cat([first, second]).sort().values
    shares = [torch.searchsorted(each.sort().values, places, right=True) / len(each) for each in (first, second)]
    return float((shares[0] - shares[1]).abs().max())
