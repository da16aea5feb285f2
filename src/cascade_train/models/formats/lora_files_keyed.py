"""Adapters under ComfyUI's and kohya's names: one safetensors file, one name per adapted module.

Both spell a module's path with underscores. ComfyUI maps `lora_prior_unet_` and `lora_unet_` onto the names of its own
Stage C, and `lora_prior_te_` onto its text encoder (comfy/lora.py); kohya's branch for the cascade writes `lora_unet_`
and `lora_te_` (networks/lora.py). Both keep q, k and v apart below `attention.attn` and call the output `out_proj`. Of
Stable Diffusion kohya writes diffusers' names, of XL the original's, and `lora_te1_` for the first text encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.formats.original_names import unet_modules
from cascade_train.models.formats.weights_tensors import write_tensors
from cascade_train.models.lora import TEXT_ENCODERS, LoraSpec, StoredLora, adapted_modules

PREFIXES = {
    "comfyui": ("lora_prior_unet_", "lora_prior_te_"),
    "kohya": ("lora_unet_", "lora_te_"),
    "kohya_sdxl": ("lora_unet_", "lora_te1_"),
}
"""Style -> prefixes of the network's and of the text encoder's modules."""

SECOND_PREFIX = "lora_te2_"
"""Prefix of the second text encoder's modules, of SDXL."""

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
_DOTTED = ("base_model.model.", "prior.", "unet.", "diffusion_model.")
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


def foreign_name(name: str, *, is_stage_b: bool = False) -> str:
    """Return a module's dotted name in ComfyUI's and kohya's networks."""
    name = name.replace(".attention.to_out.0", ".attention.attn.out_proj").replace(
        ".attention.to_", ".attention.attn.to_"
    )
    return "clip_mapper" if is_stage_b and name == "clip_txt_pooled_mapper" else name


def write_keyed(
    path: Path, lora: StoredLora, metadata: Mapping[str, str], *, style: str, modules: Iterable[str] = ()
) -> None:
    """Write adapters under ComfyUI's or kohya's names; `style` is a key of `PREFIXES`.

    `modules` are all of the network, in whose style "kohya_sdxl" some have names by their place among the others.

    Trained tokens are not part of these formats, see `write_token_files`. `metadata` is added to the header.
    """
    is_stage_b = any(name.startswith("clip_mapper") for name in lora.spec.targets)
    originals = unet_modules(modules) if style == "kohya_sdxl" else {}
    tensors: dict[str, Tensor] = {}
    of_network, of_text = PREFIXES[style]
    states = ((of_network, lora.state), (of_text, lora.text_encoder), (SECOND_PREFIX, lora.text_encoder_2))
    for prefix, state in states:
        for name in adapted_modules(state):
            foreign = originals.get(name) or foreign_name(name, is_stage_b=is_stage_b)
            stem = prefix + foreign.replace(".", "_")
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


def is_of_unet(targets: Iterable[str]) -> bool:
    """Return whether adapted modules are those of Stable Diffusion's network, and not of the cascade's."""
    return any(".attentions." in name or ".resnets." in name for name in targets)


def write_token_files(folder: Path, lora: StoredLora) -> None:
    """Write each trained token as an embedding that ComfyUI finds by file name, into `folder` (made anew)."""
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
    tensors: Mapping[str, Tensor], modules: Iterable[str], origin: str, *, alpha: float | None = None
) -> StoredLora:
    """Read adapters under ComfyUI's, kohya's or dotted names, for a network with these modules.

    `alpha` is that of every adapter; None = as the tensors say. A ConfigError names what does not belong or lacks.
    """
    found, names = _collect(tensors, origin), _known_names(modules)
    network: dict[str, Adapter] = {}
    text: dict[str, dict[str, Adapter]] = {tower: {} for tower in TEXT_ENCODERS}
    for stem, adapter in found.items():
        adapter.alpha = adapter.alpha if alpha is None else torch.tensor(alpha)
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
        ending = next((end for end in sorted(_HALVES, key=len, reverse=True) if name.endswith(end)), None)
        if ending is None:
            raise ConfigError(f"{origin}: {name} is no part of a low-rank adapter; other kinds are not read")
        setattr(found.setdefault(name.removesuffix(ending), Adapter()), _HALVES[ending], tensor)
    for stem, adapter in found.items():
        if adapter.down is None or adapter.up is None:
            raise ConfigError(f"{origin}: {stem} lacks half of its adapter; copy the file again")
    return found


def _known_names(modules: Iterable[str]) -> dict[str, str]:
    """Return every spelling of the network's modules -> our name."""
    names: dict[str, str] = {}
    modules = list(modules)
    originals = unet_modules(modules) if is_of_unet(modules) else {}
    names |= {f"{PREFIXES['kohya'][0]}{each.replace('.', '_')}": name for name, each in originals.items()}
    for module in modules:
        for spelling in {module, foreign_name(module), foreign_name(module, is_stage_b=True)}:
            names |= {f"{prefix}{spelling}": module for prefix in ("", *_DOTTED)}
            names |= {f"{prefix}{spelling.replace('.', '_')}": module for prefix, _ in PREFIXES.values()}
    return names


def _text_name(stem: str) -> tuple[str, str] | None:
    """Return the text encoder and its module that a stored name means; None = no module of one."""
    prefixes = {prefix: "text_encoder" for _, prefix in PREFIXES.values()} | {SECOND_PREFIX: "text_encoder_2"}
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
    """Bring adapters to one rank and alpha without changing what they compute.

    Smaller ranks are filled up with zeros; where alpha / rank differs, it is multiplied into the up half.
    """
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
