"""Adapters in memory, by peft: which modules get them, and their initial values.

Must not live here: what a kind of adapters computes (adapters/), files (formats/lora_files.py), and what trains or when
(tasks/).
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import regex
import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.adapters.kind import Init, Strength, usual
from cascade_train.models.adapters.kind import LoraSpec as LoraSpec
from cascade_train.models.adapters.kinds import KINDS, is_adapter, output_norms, peft_options
from cascade_train.models.initialize import Shares, fill_
from cascade_train.options import is_found

ADAPTER = "default"
"""peft's name of the one adapter that a network carries."""

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
"""Names of text encoders, as they have them in models, roots and files."""

MAGNITUDE = ".lora_magnitude_vector."


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Trained rows of the text encoder's vocabulary.

    Attributes:
        strings: the tokens as they are typed or as the vocabulary spells them.
        ids: of the tokens in the vocabulary.
        is_new: whether each was added to the vocabulary.
        rows: (N, D) fp32, whole rows, not differences.
    """

    strings: tuple[str, ...]
    ids: tuple[int, ...]
    is_new: tuple[bool, ...]
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredLora:
    """Adapters with their values on the host, as files have them.

    Attributes:
        state: by plain names, see `adapter_state`; those of a text encoder by its `full_name`.
        tokens: trained rows of the vocabulary of each text encoder that has any, by its name.
    """

    spec: LoraSpec
    state: Mapping[str, Tensor]
    tokens: Mapping[str, TrainedTokens] = field(default_factory=dict)

    def by_root(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of the network, by "", and of each text encoder that has adapters, by its name."""
        found: dict[str, dict[str, Tensor]] = {"": {}}
        for name, value in self.state.items():
            tower, inner = split_tower(name)
            found.setdefault(tower, {})[inner] = value
        return found


def split_tower(name: str) -> tuple[str, str]:
    """Return the text encoder that a name in files begins with, "" = none, and the rest of the name."""
    tower, _, inner = name.partition(".")
    return (tower, inner) if tower in TEXT_ENCODERS else ("", name)


def inject_lora(
    network: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    module_filters: Sequence[str] | None,
    seed: int,
    init: Init = "kaiming",
    dora: bool = False,
    joint_qkv: bool = False,
    kind: str = "lora",
    factor: int | None = None,
    key: str = "task.module_filters",
    without: Sequence[str] = (),
    ranks: Sequence[Sequence[Any]] | None = None,
    root: str = "network",
) -> list[str]:
    """Freeze `network`, give the selected modules fp32 adapters in place, and return their names.

    The network is whole (not sharded) and not adapted yet; on meta, only adapters have values. The base keeps its
    dtype; layers cast to fp32 for the adapter and back. First values are a function of (seed, module name) alone. With
    `dora` the magnitude of each output trains too, initialised as the base's; with `joint_qkv`, q, k and v of an
    attention share one A. `module_filters` and `key` are those of `select_modules`; `without` names excluded modules.
    The first of `ranks`, (expression, rank) or (expression, rank, alpha), that is found in `full_name` or in the
    original's name gives a module a rank, and where it has one an alpha, of its own.
    """
    chosen, outside = select_modules(network, module_filters, key=key), tuple(f"{name}." for name in without)
    targets = [name for name in chosen if not f"{name}.".startswith(outside)] if outside else chosen
    if not targets:
        raise ConfigError(f"{key}: selects only modules whose output is not used, {chosen[0]} for one; name others")
    own: dict[str, Strength] = {}
    for name in targets if ranks else ():
        names = full_name(root, name), original_name(name)
        found = (each for each in ranks or () if is_found("task.ranks", each[0], *names))
        for _, columns, *scaled in itertools.islice(found, 1):
            own[name] = Strength(columns, scaled[0] if scaled else alpha)
    spec = LoraSpec(
        rank=rank,
        alpha=alpha,
        targets=tuple(targets),
        base_size=None,
        dora=dora,
        kind=kind,
        factor=factor,
        ranks={name: each.rank for name, each in own.items()},
        alphas={name: each.alpha for name, each in own.items()},
    )
    attach_adapters(network, spec, dropout=dropout)
    for name, layer in adapted_layers(network):
        for part, parameter in layer_parts(layer).items():
            fill_(parameter, KINDS[kind].fill(part, parameter, init), seed, f"{name}.{part.removesuffix('.weight')}")
        weight = layer.get_base_layer().weight
        if dora and weight.is_meta:
            layer.lora_magnitude_vector[ADAPTER].to("meta")  # until the base has values, see `begin_magnitudes`
        elif dora:
            magnitude = layer.lora_magnitude_vector[ADAPTER].weight
            magnitude.data.copy_(output_norms(weight).view_as(magnitude))
    if joint_qkv:
        share_down_halves(network)
    return targets


def begin_magnitudes(network: nn.Module, fill: Callable[[Shares], None], shares: Shares) -> None:
    """Initialise magnitudes as the lengths of their base's rows, with one whole base weight at a time in memory.

    The adapted network may be sharded; `fill` writes values of its base, `shares` are this process's rows of it.
    """
    for name, (rows, first) in shares.items():
        path, is_magnitude, _ = name.partition(MAGNITUDE)
        if is_magnitude and rows.numel():
            layer: Any = network.get_submodule(path)
            weight = layer.get_base_layer().weight
            whole = torch.empty(weight.shape, dtype=weight.dtype)
            fill({f"{path}.weight": (whole, 0)})
            norms = output_norms(whole).view_as(layer.lora_magnitude_vector[ADAPTER].weight)
            rows.copy_(norms[first : first + len(rows)])


def share_down_halves(network: nn.Module) -> None:
    """Share the A of q with k and v of every adapted attention, in place; a ConfigError where their inputs differ.

    As in the original, which adapts the three as one layer (Stable Cascade, modules/lora.py).
    """
    layers = dict(adapted_layers(network))
    for name, layer in layers.items():
        for projection in ("to_k", "to_v") if name.endswith(".to_q") else ():
            other = layers.get(f"{name.removesuffix('to_q')}{projection}")
            if other is not None:
                if other.r[ADAPTER] != layer.r[ADAPTER]:
                    raise ConfigError(
                        f"task.joint_qkv=true: task.ranks gives {name} and {projection} other ranks, and they have a "
                        "half in common; give q, k and v one rank"
                    )
                if other.lora_A[ADAPTER].weight.shape != layer.lora_A[ADAPTER].weight.shape:
                    raise ConfigError(
                        f"task.joint_qkv=true: {name} and {projection} take different inputs, of latents and of text, "
                        "which have no half in common; set it to false"
                    )
                other.lora_A[ADAPTER].weight = layer.lora_A[ADAPTER].weight


def select_modules(
    network: nn.Module, module_filters: Sequence[str] | None, *, key: str = "task.module_filters"
) -> list[str]:
    """Return the names of the modules that any of the filters selects, in the network's order; None = all.

    A filter is a substring of a module's name; one that is a substring of none is tried as a regular expression; a
    ConfigError if it selects nothing. Names are diffusers' and also the original's, where `.attn` means the attention's
    four projections. Linear and ungrouped convolution layers can be adapted, depthwise ones cannot.
    """
    layers = (nn.Linear, nn.Conv2d)
    modules = [(name, module) for name, module in network.named_modules() if isinstance(module, layers)]
    names = [name for name, module in modules if getattr(module, "groups", 1) == 1]
    if module_filters is None:
        return names
    chosen: set[str] = set()
    for module_filter in module_filters:
        matched = _matches(module_filter, names)
        if not matched:
            raise ConfigError(f"{key}: {_no_match(module_filter, names)}")
        chosen.update(matched)
    if not chosen:
        raise ConfigError(f"{key}=[]: selects no module; name some, or null for every linear layer")
    return [name for name in names if name in chosen]


def original_name(name: str) -> str:
    """Return the original's name of a module, as far as filters need it: fused projections become one."""
    fused = re.sub(r"\.attention\.to_[qkv]$", ".attention.attn.in_proj", name)
    return re.sub(r"\.attention\.to_out\.0$", ".attention.attn.out_proj", fused)


def _matches(module_filter: str, names: Sequence[str]) -> list[str]:
    both = [(name, f"{name}\n{original_name(name)}") for name in names]
    found = [name for name, text in both if module_filter in text]
    if found:
        return found
    try:
        pattern = regex.compile(module_filter)
        return [name for name, text in both if any(pattern.search(line, timeout=1.0) for line in text.split("\n"))]
    except (regex.error, TimeoutError):
        return []


def _no_match(module_filter: str, names: Sequence[str]) -> str:
    parts = {part for name in names for part in f"{name}.{original_name(name)}".split(".") if not part.isdigit()}
    near = difflib.get_close_matches(module_filter.strip("."), sorted(parts), n=3, cutoff=0.5)
    hint = f"near: {', '.join(near)}" if near else f"modules are named like {names[len(names) // 2]}"
    return f"{module_filter!r} selects no linear or ungrouped convolution layer; {hint}"


def attach_adapters(network: nn.Module, spec: LoraSpec, *, dropout: float = 0.0) -> None:
    """Freeze `network` and add fp32 adapters without values to exactly the spec's targets, in place.

    No random number is drawn. Adapters are in the mode and on the device of their layer (on the host for meta).
    """
    from peft import inject_adapter_in_model  # takes seconds

    network.requires_grad_(requires_grad=False)
    patterns = {
        f"{key}_pattern": {f"^{re.escape(name)}": own[name] for name in spec.targets if name in own}
        for key, own in (("rank", spec.ranks), ("alpha", spec.alphas))
    }
    config = KINDS[spec.kind].config(spec, dropout=dropout, target_modules=list(spec.targets), **patterns)
    inject_adapter_in_model(config, network, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    layers = dict(adapted_layers(network))
    if set(layers) != set(spec.targets):
        raise AssertionError(f"peft adapted other modules than asked: {sorted(set(layers) ^ set(spec.targets))[:3]}")
    for layer in layers.values():
        device = layer.get_base_layer().weight.device
        for name, parameter in _own_parameters(layer):
            memory = torch.empty(parameter.shape, device="cpu" if device.type == "meta" else device)
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(memory))
        layer.train(layer.get_base_layer().training)


def _own_parameters(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in layer.named_parameters() if not name.startswith("base_layer.")]


def layer_parts(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapted layer's adapter, by the names of its kind."""
    return {plain_name(name): parameter for name, parameter in _own_parameters(layer)}


def plain_name(name: str) -> str:
    """Return a name of peft's without `ADAPTER`."""
    return name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


def adapted_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, peft's layer) of the adapted modules, in the network's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in network.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@contextmanager
def without_adapters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let adapted modules compute what their base does. What trains stays as it is, unlike with peft's own method."""
    layers = [layer for module in modules for _, layer in adapted_layers(module)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def halves_are_shared(state: Mapping[str, Tensor]) -> bool:
    """Return whether q, k and v of every attention have equal As in a state by plain names."""
    downs = {name: value for name, value in state.items() if name.endswith(".to_q.lora_A.weight")}
    others = ((state.get(name.replace(".to_q.", f".to_{p}.")), value) for name, value in downs.items() for p in "kv")
    return all(other is None or torch.equal(other, value) for other, value in others)


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters of a whole network's state dict by plain names, without `ADAPTER`.

    Of LoRA `<module>.lora_A.weight` and `.lora_B.weight`, with DoRA also `.lora_magnitude_vector.weight`.
    """
    # copied: adapters that share a tensor are stored as if they did not
    return {plain_name(name): value.clone() for name, value in state.items() if is_adapter(name)}


def tower_name(name: str) -> str:
    """Return the name in files of a tensor of a text encoder, whatever its class in transformers."""
    return name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"


def full_name(root: str, name: str) -> str:
    """Return the name by which `task.ranks` finds a module of the network or of a text encoder."""
    return f"{root}.{name if root == 'network' else tower_name(name)}"


def lora_spec(network: nn.Module, encoders: Mapping[str, nn.Module] = MappingProxyType({})) -> LoraSpec:
    """Return the architecture of the adapters of a network, which must have some, and of text encoders."""
    layers = dict(adapted_layers(network))
    if not layers:
        raise AssertionError("the network carries no adapters")
    options = peft_options(network.peft_config[ADAPTER].to_dict())
    named = {f"{tower}.{tower_name(n)}": each for tower, m in encoders.items() for n, each in adapted_layers(m)}
    options["rank"], ranks = usual({name: each.r[ADAPTER] for name, each in (layers | named).items()})
    scaled = {name: getattr(each, "lora_alpha", None) or each.alpha for name, each in (layers | named).items()}
    options["alpha"], alphas = usual({name: float(each[ADAPTER]) for name, each in scaled.items()})
    shapes = {name.replace(".base_layer.", "."): tuple(value.shape) for name, value in network.state_dict().items()}
    size = network.family.size_of(shapes)
    return LoraSpec(targets=tuple(layers), base_size=size, ranks=ranks, alphas=alphas, **options)


def set_adapter_mode(network: nn.Module) -> None:
    """Put the frozen base into eval mode and the adapters' own dropout into train mode.

    On a frozen base dropout would add noise alone. The original leaves it on until the first sample (Stable Cascade,
    train/train_c_lora.py).
    """
    network.eval()
    for name, module in network.named_modules():
        if name.endswith(".lora_dropout"):
            module.train()
