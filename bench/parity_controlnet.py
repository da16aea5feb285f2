"""Cases of the control network (controlnet_modules), run on our code."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch

from bench.parity_case import Comparison, Outcome, Variant, fact
from bench.parity_networks import CPU, recipe_fill
from cascade_train.models.cascade.networks.controlnet import (
    ControlNetwork,
    ControlResBlock,
    ControlSpec,
    build_control_network,
)
from cascade_train.models.initialize import materialise


@torch.no_grad()
def modules(variant: Variant) -> Outcome:
    """Run controlnet_modules: backbone, projections, and which blocks get a map."""
    if variant.args["mode"] == "resblock":
        return _residual_block(variant)
    network, facts = (_stored if variant.args["mode"] == "stored" else _by_recipe)(variant)
    facts.append(fact("weights", sum(p.numel() for p in network.parameters()), variant.facts["n_params"], 0.0))
    control = network(variant.inputs["x"])
    got = {"backbone": network.backbone(variant.inputs["x"])}
    got |= {f"proj.{block:02d}": value for block, value in control.items()}
    pattern = [block not in control for block in range(len(variant.facts["deliverer_none_pattern"]))]
    wrong = sum(a is not b for a, b in zip(pattern, variant.facts["deliverer_none_pattern"], strict=True))
    return Outcome(got, facts=[*facts, fact("blocks without a map", wrong, 0, 0.0)])


def _residual_block(variant: Variant) -> Outcome:
    block = ControlResBlock(variant.args["c"])
    block.load_state_dict(variant.weights)
    return Outcome({"y": block(variant.inputs["x"])})


def _spec(args: dict[str, Any]) -> ControlSpec:
    return ControlSpec(
        channels=args["c_in"],
        bottleneck=args["bottleneck_mode"] or "effnet",
        blocks=tuple(args["proj_blocks"]),
        widths=(args["c_proj"],) * len(args["proj_blocks"]),
    )


def _stored(variant: Variant) -> tuple[ControlNetwork, list[Comparison]]:
    """Return the network with the case's weights, and whether it was silent before."""
    network = build_control_network(_spec(variant.args["ctor"]), device=CPU, seed=0)
    silent = all(not projection[2].weight.any() for projection in network.projections)
    facts = [fact("silent at first", float(silent), float(variant.facts["fresh_last_projection_all_zero"]), 0.0)]
    wrong = sum(a != b for a, b in zip_longest(network.state_dict(), variant.facts["state_dict_keys"]))
    network.load_state_dict(variant.weights)
    return network, [*facts, fact("names that differ", wrong, 0, 0.0)]


def _by_recipe(variant: Variant) -> tuple[ControlNetwork, list[Comparison]]:
    """Return the network with the weights of the cases' recipe, and whether these are the original's."""
    with torch.device("meta"):
        network = ControlNetwork(_spec(variant.args["ctor"]))
    materialise(network, CPU, torch.float32)
    digest = recipe_fill(network, variant.args["recipe_seed"], variant.args["recipe_gain"])
    problem = None if digest == variant.facts["recipe_sha256"] else "the recipe gave other weights"
    return network, [Comparison("recipe_sha256", 0.0, 0.0, problem)]
