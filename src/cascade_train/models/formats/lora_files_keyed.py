"""Adapters under ComfyUI's and kohya's names: one safetensors file, one name with underscores per adapted module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.family import Family, Spelling
from cascade_train.models.formats.weights import write_tensors
from cascade_train.models.lora import TEXT_ENCODERS, LoraSpec, StoredLora, adapted_modules

TEXT_PREFIXES = ("lora_prior_te_", "lora_te_", "lora_te1_")
"""Prefixes of a text encoder's modules in files of any family."""

SECOND_PREFIX = "lora_te2_"
"""Prefix of a second text encoder's modules."""

_HALVES = {
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".alpha": "alpha",
    ".dora_scale": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_DOTTED = ("", "base_model.model.", "diffusion_model.")
_TEXT_MODULE = re.compile(r"text_model_encoder_layers_(\d+)_(self_attn_[kqv]_proj|self_attn_out_proj|mlp_fc[12])")


@dataclass
class Adapter:
    """One module's adapter as it is stored: down (r, in, …), up (out, r, …), alpha (None = r), magnitude (out, …)."""

    down: Tensor | None = None
    up: Tensor | None = None
    alpha: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def scale(self) -> float:
        """Return alpha / rank."""
        assert self.down is not None
        return 1.0 if self.alpha is None else float(self.alpha) / self.down.shape[0]


def write_keyed(path: Path, lora: StoredLora, metadata: Mapping[str, str], *, spelling: Spelling) -> None:
    """Write adapters under the names of another program, without trained tokens; `metadata` is added to the header."""
    tensors: dict[str, Tensor] = {}
    of_towers = ((spelling.text_encoder, lora.text_encoder), (SECOND_PREFIX, lora.text_encoder_2))
    states = ((spelling.network, lora.state), *of_towers)
    for prefix, state in states:
        for name in adapted_modules(state):
            stem = prefix + spelling.names.get(name, name).replace(".", "_")
            up = state[f"{name}.lora_B.weight"]
            tensors[f"{stem}.lora_down.weight"] = state[f"{name}.lora_A.weight"]
            tensors[f"{stem}.lora_up.weight"] = up
            tensors[f"{stem}.alpha"] = torch.tensor(lora.spec.alpha)
            magnitude = state.get(f"{name}.lora_magnitude_vector.weight")
            if magnitude is not None:
                tensors[f"{stem}.dora_scale"] = magnitude.reshape(-1, *[1] * (up.ndim - 1))
    header = {  # what kohya's programs look for
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(lora.spec.rank),
        "ss_network_alpha": str(lora.spec.alpha),
        "base_size": lora.spec.base_size or "",
    }
    write_tensors(path, tensors, {**metadata, **header})


def write_token_files(folder: Path, lora: StoredLora) -> None:
    """Write each trained token into `folder`, as an embedding that ComfyUI finds by file name."""
    assert lora.tokens is not None
    folder.mkdir(parents=True, exist_ok=True)
    for string, row in zip(lora.tokens.strings, lora.tokens.rows, strict=True):
        write_tensors(folder / f"{token_file(string)}.safetensors", {"clip_g": row[None]}, {"token": string})


def token_file(token: str) -> str:
    """Return the name, without ending, of the file that holds a token."""
    return re.sub(r"[^\w-]+", "", token.removesuffix("</w>")) or "token"


def is_keyed(names: Iterable[str]) -> bool:
    """Return whether stored names are adapters by module name."""
    return any(name.endswith(tuple(_HALVES)) and not name.endswith(".alpha") for name in names)


def read_keyed(
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    origin: str,
    *,
    family: Family,
    alpha: float | None = None,
) -> StoredLora:
    """Read adapters under ComfyUI's, kohya's or dotted names, for a family's network with these modules.

    `alpha` is that of every adapter; None = that of the tensors. A ConfigError names what is missing or unexpected.
    """
    found, names = _collect(tensors, origin), _known_names(family, [*modules])
    network: dict[str, Adapter] = {}
    text: dict[str, dict[str, Adapter]] = {tower: {} for tower in TEXT_ENCODERS}
    for stem, adapter in found.items():
        adapter.alpha = adapter.alpha if alpha is None else torch.tensor(alpha)
        if not math.isfinite(adapter.scale):
            raise ConfigError(f"{origin}: {stem} is scaled by {adapter.scale}; copy the file again")
        if stem in names:
            network[names[stem]] = adapter
        elif (found_in := _text_name(stem)) is not None:
            text[found_in[0]][found_in[1]] = adapter
        else:
            raise ConfigError(
                f"{origin}: adapts {stem}, which this model has not; choose the model= the adapter was trained on"
            )
    return _unify(network, text)


def _collect(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Adapter]:
    found: dict[str, Adapter] = {}
    for name, tensor in tensors.items():
        ending = next((end for end in _HALVES if name.endswith(end)), None)
        if ending is None:
            raise ConfigError(f"{origin}: {name} is no part of a low-rank adapter; other kinds are not read")
        setattr(found.setdefault(name.removesuffix(ending), Adapter()), _HALVES[ending], tensor)
    for stem, adapter in found.items():
        if adapter.down is None or adapter.up is None:
            raise ConfigError(f"{origin}: {stem} lacks half of its adapter; copy the file again")
    return found


def _known_names(family: Family, modules: Sequence[str]) -> dict[str, str]:
    """Return every spelling of the network's modules -> our name."""
    dotted = (*_DOTTED, *(f"{part}." for part in family.parts))
    names = {f"{prefix}{module}": module for module in modules for prefix in dotted}
    for each in family.spellings(modules):
        for ours, theirs in each.names.items():
            names |= {f"{prefix}{theirs}": ours for prefix in dotted}
            names |= {f"{each.network}{spelled.replace('.', '_')}": ours for spelled in (ours, theirs)}
    return names


def _text_name(stem: str) -> tuple[str, str] | None:
    """Return the text encoder and its module that a stored name means; None = no module of one."""
    prefixes = dict.fromkeys(TEXT_PREFIXES, "text_encoder") | {SECOND_PREFIX: "text_encoder_2"}
    for prefix, tower in prefixes.items():
        inner = stem.removeprefix(prefix)
        if inner == stem:
            continue
        if inner == "text_projection":
            return tower, inner
        if (match := _TEXT_MODULE.fullmatch(inner)) is not None:
            layer = match[2].replace("self_attn_", "self_attn.").replace("mlp_", "mlp.")
            return tower, f"text_model.encoder.layers.{match[1]}.{layer}"
    tower, _, name = stem.partition(".")
    return (tower, name) if tower in TEXT_ENCODERS else None


def _unify(network: Mapping[str, Adapter], text: Mapping[str, Mapping[str, Adapter]]) -> StoredLora:
    """Convert adapters to one rank and alpha: pad ranks with zeros, multiply other scales into the up half."""
    adapters = [*network.values(), *(adapter for tower in text.values() for adapter in tower.values())]
    rank = max(a.down.shape[0] for a in adapters if a.down is not None)
    scales = {a.scale for a in adapters}
    scale = scales.pop() if len(scales) == 1 else 1.0
    state, *towers = (
        {k: v for n, a in d.items() for k, v in _plain(n, a, rank, scale).items()} for d in (network, *text.values())
    )
    dora = any(a.magnitude is not None for a in adapters)
    largest = next(a for a in adapters if a.down is not None and a.down.shape[0] == rank)
    alpha = float(rank) if largest.alpha is None or largest.scale != scale else float(largest.alpha)
    spec = LoraSpec(rank=rank, alpha=alpha, targets=tuple(network), base_size=None, dora=dora)
    return StoredLora(spec=spec, state=state, text_encoder=towers[0], text_encoder_2=towers[1])


def _plain(name: str, adapter: Adapter, rank: int, scale: float) -> dict[str, Tensor]:
    assert adapter.down is not None and adapter.up is not None  # noqa: PT018 - collected whole
    down, up, missing = adapter.down.float(), adapter.up.float(), rank - adapter.down.shape[0]
    if adapter.scale != scale:
        up = up * (adapter.scale / scale)
    if missing:
        down = torch.cat([down, down.new_zeros(missing, *down.shape[1:])])
        up = torch.cat([up, up.new_zeros(up.shape[0], missing, *up.shape[2:])], dim=1)
    plain = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    if adapter.magnitude is not None:
        shape = (1, -1, 1, 1) if up.ndim == 4 else (-1,)
        plain[f"{name}.lora_magnitude_vector.weight"] = adapter.magnitude.float().reshape(shape)
    return plain
