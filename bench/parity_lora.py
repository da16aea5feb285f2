"""Cases of adapters (lora, train_steps_lora), run on our code.

The original's files come in through our importer. It adapts q, k and v of an attention with one shared down half.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.parity_case import Comparison, NotCoveredError, Outcome, Variant, fact, recorded
from bench.parity_networks import build_network, fetch, network_config
from bench.parity_text import (
    SET_ORDER,
    dropped_below,
    expressible,
    in_order,
    probed_stage,
    shipped_drop,
    text_encoder,
    trained_table,
    whole_table,
)
from bench.parity_training import Recorder, bind, build_objective, finished, measured, recorded_batch, train
from cascade_train.distributed.parallelize import local
from cascade_train.distributed.process_group import process_group
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.formats.lora_file_original import Place, original_places
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.lora_files import fill_adapters, module_shapes, read_lora, refill_lora
from cascade_train.models.lora import ADAPTER, adapted_layers, attach_adapters, inject_lora
from cascade_train.tasks.lora import LoRA

DEPTHWISE = "the original adapts the depthwise layers too, for which peft has no adapter; the others are compared"


def lora(variant: Variant) -> Outcome:
    """Run lora: outputs without, with fresh, with loaded, disabled and merged adapters, and their gradients."""
    args = variant.args
    places = _places(variant)
    network = build_network(args["ctor"], variant.weights)
    order = original_places(module_shapes(network), args["filters"])
    facts = [fact("modules out of order", sum(a != b for a, b in zip_longest(places, order)), 0, 0.0)]
    got = {"y.before_lora": _run(network, variant)}
    if any("depthwise" in place.name for place in places):
        return _without_depthwise(variant, network, places, got, facts)
    fresh = build_network(args["ctor"], variant.weights)
    first = {"rank": args["rank"], "alpha": 1.0, "dropout": 0.0, "seed": 0, "init": "original"}
    inject_lora(fresh, module_filters=args["filters"], **first)
    _load(network, variant, places)
    got |= {"y.fresh_lora": _run(fresh, variant), "y.with_lora": _run(network, variant)}
    (got["y.with_lora"] * variant.inputs["g"]).sum().backward()
    for i, place in enumerate(places):
        down, up = _halves(network, place, gradients=True)
        got |= {f"grad.weights.{i}.lora_down": down, f"grad.weights.{i}.lora_up": up}
    _enable(network, enabled=False)
    got["y.lora_disabled"] = _run(network, variant)
    _enable(network, enabled=True)
    _merge(network)
    return Outcome(got | {"y.merged": _run(network, variant)} | _merged(variant, network), facts=facts)


def _without_depthwise(
    variant: Variant,
    network: CascadeUNet,
    places: Sequence[Place],
    got: dict[str, Tensor],
    facts: list[Comparison],
) -> Outcome:
    _load(network, variant, [place for place in places if "depthwise" not in place.name])
    _merge(network)
    got |= {name: value for name, value in _merged(variant, network).items() if "depthwise" not in name}
    whole = ("y.fresh_lora", "y.with_lora", "y.lora_disabled", "y.merged", "grad.*", "merged.*depthwise*")
    return Outcome(got, left_out=dict.fromkeys(whole, DEPTHWISE), facts=facts)


def _run(network: CascadeUNet, variant: Variant) -> Tensor:
    given = variant.inputs
    sides = {name: given[name] for name in ("clip_text", "clip_img")}
    return network(given["x"], given["r"], given["clip_text_pooled"], **sides, return_dict=False)[0]


def _places(variant: Variant) -> list[Place]:
    """Return the adapted modules in the order in which the original numbers them."""
    names = [name.split(".parametrizations.")[0] for name in variant.facts["module_order"]]
    projections = tuple("qkv")
    return [
        Place(n, tuple(f"{n.removesuffix('.attn')}.to_{p}" for p in projections))
        if n.endswith(".attention.attn")
        else Place(n, (n.replace(".attention.attn.out_proj", ".attention.to_out.0"),))
        for n in names
    ]


def _load(network: CascadeUNet, variant: Variant, places: Sequence[Place]) -> None:
    """Put the case's adapters of some modules onto a network, from a file in the original's layout."""
    every, tensors = [place.name for place in _places(variant)], {}
    for i, place in enumerate(places):
        for half in ("lora_down", "lora_up"):
            tensors[f"weights.{i}.{half}"] = variant.inputs[f"lora.weights.{every.index(place.name)}.{half}"]
    named = None if len(places) == len(every) else {"modules": json.dumps([place.name for place in places])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lora.safetensors"
        save_file(tensors, path, metadata=named)
        filters = variant.args["filters"]
        lora = read_lora(str(path), key="lora", family=CASCADE, modules=module_shapes(network), module_filters=filters)
    spec = lora.spec
    attach_adapters(network, spec)
    fill_adapters(network, lora.state, str(path))


def _merge(network: CascadeUNet) -> None:
    for name, layer in list(adapted_layers(network)):
        layer.merge()
        network.set_submodule(name, layer.get_base_layer())


def _enable(network: CascadeUNet, *, enabled: bool) -> None:
    for _, layer in adapted_layers(network):
        layer.enable_adapters(enabled)


def _merged(variant: Variant, network: CascadeUNet) -> dict[str, Tensor]:
    names = [name for name in variant.outputs if name.startswith("merged.")]
    return {name: fetch(network, name.removeprefix("merged."), lambda p: p.detach()) for name in names}


def _halves(network: nn.Module, place: Place, *, gradients: bool) -> tuple[Tensor, Tensor]:
    """Return down (r, in) and up (out, r) of one of the original's modules, or their gradients.

    A shared half has the sum of its users' gradients, counted once where ours share it too.
    """
    layers = [network.get_submodule(name) for name in place.ours]
    downs = {id(p): p for p in (layer.lora_A[ADAPTER].weight for layer in layers)}.values()
    ups = [layer.lora_B[ADAPTER].weight for layer in layers]
    if gradients:
        return torch.stack([p.grad.flatten(1) for p in downs]).sum(0), torch.cat([p.grad.flatten(1) for p in ups])
    values = [local(p.detach()).flatten(1).clone() for p in (*list(downs)[:1], *ups)]
    return values[0], torch.cat(values[1:])


class RecordedLora(Recorder, LoRA):
    """Training of adapters and tokens that keeps its losses."""


def lora_steps(variant: Variant) -> Outcome:
    """Run train_steps_lora: whole optimizer steps of adapters and tokens, through the text tower."""
    args, given = variant.args, variant.inputs
    network = build_network(args["ctor"], _weights(variant, "gen."))
    if any("depthwise" in place.name for place in original_places(module_shapes(network), args["filters"])):
        raise NotCoveredError("the original adapts depthwise layers, for which peft has no adapter")
    encoder = text_encoder(args, _weights(variant, "clip."))
    stage = probed_stage(network_config(args["ctor"]), network, encoder, None, given)
    entries, notes = expressible(encoder, args["train_tokens"])
    task = build_task(args, entries)
    batches = [
        recorded_batch(i, given[f"mb.{i:02d}.latents"], captions, draws)
        for i, (captions, draws) in enumerate(zip(args["captions"], _draws(given), strict=True))
    ]
    with process_group() as world:
        task.attach(stage, build_objective(adaptive=args["adaptive_loss_weight"]), world.device)
        table, wanted = trained_table(encoder), given["lora.embeddings.indices"].tolist()
        got: dict[str, Tensor] = {"table_after_selection": whole_table(table)}
        place = [table.ids.index(i) for i in wanted]
        table.shift.data[place] = given["lora.embeddings.embeddings"]
        _start(network, given, args)
        phase = bind(world, task, args)
        values = train(world, task, phase, batches, args)
        got |= measured(task.outputs, stage.seen, values, args)
        got |= {name: torch.stack([t[name] for t in stage.told]) for name in ("input_ids", "attention_mask")}
        shift_ND = local(table.shift.detach())[place]
        got |= {"final.embeddings.embeddings": shift_ND, "final.embeddings.indices": in_order(table, wanted)}
        for i, spot in enumerate(original_places(module_shapes(network), args["filters"])):
            down, up = _halves(network, spot, gradients=False)
            got |= {f"final.weights.{i}.lora_down": down, f"final.weights.{i}.lora_up": up}
        buckets = task.state_dict().get("loss_weight.bucket_loss")
    outcome = finished(variant, got if buckets is None else got | {"bucket_losses_final": buckets}, {})
    outcome.notes += [SET_ORDER, *notes]
    return outcome


def build_task(args: Mapping[str, Any], entries: list[Any]) -> RecordedLora:
    """Return the task as the case describes it, its adapters joint as the original's."""
    task = RecordedLora(
        rank=args["rank"],
        alpha=1.0,
        dropout=0.0,
        module_filters=args["filters"],
        dora=False,
        text_encoder_filters=None,
        train_tokens=[list(entry) for entry in entries],
        weights=None,
        seed=0,
        cond_drop_prob=shipped_drop("lora"),
        image_keep_prob=0.0,
        joint_qkv=True,
    )
    task.outputs = []
    return task


def _draws(given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    kinds = (recorded(given, "np_rand"), recorded(given, "randn_like"), recorded(given, "rand"))
    return [
        {"caption_drop": dropped_below(kept_B), "image_keep": torch.ones(len(u_B)), "noise": noise, "timestep": u_B}
        for kept_B, noise, u_B in zip(*kinds, strict=True)
    ]


def _start(network: CascadeUNet, given: Mapping[str, Tensor], args: Mapping[str, Any]) -> None:
    """Give the adapters the case's first values, from a file in the original's layout."""
    weights = {n.removeprefix("lora."): v for n, v in given.items() if n.startswith("lora.weights.")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lora.safetensors"
        save_file(weights, path)
        refill_lora(network, str(path), module_filters=args["filters"])


def _weights(variant: Variant, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): v for n, v in variant.weights.items() if n.startswith(prefix)}
