"""Adapters under the names of ComfyUI, kohya and LyCORIS, and trained tokens as embedding files.

Adapters are one safetensors file, one name with underscores a module.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.adapters.kind import AdapterKind, LoraSpec, Parts, Strength, common
from cascade_train.models.adapters.kinds import KINDS, by_module, kind_of
from cascade_train.models.family import Family, Shape, Spelling
from cascade_train.models.formats.weights import write_tensors
from cascade_train.models.lora import StoredLora, split_tower

TEXT_PREFIXES = ("lora_prior_te_", "lora_te_", "lora_te1_")
"""Prefixes of a text encoder's modules in files of any family."""

SECOND_PREFIX = "lora_te2_"
"""Prefix of a second text encoder's modules."""

_DOTTED = ("", "base_model.model.", "diffusion_model.")
_TEXT_MODULE = re.compile(r"text_model_encoder_layers_(\d+)_(self_attn_[kqv]_proj|self_attn_out_proj|mlp_fc[12])")


def write_keyed(path: Path, lora: StoredLora, facts: Mapping[str, str], *, spelling: Spelling) -> None:
    """Write adapters under the names of another program, without trained tokens; `facts` are added to the header."""
    tensors, kind = dict[str, Tensor](), KINDS[lora.spec.kind]
    prefixes = {"": spelling.network, "text_encoder": spelling.text_encoder, "text_encoder_2": SECOND_PREFIX}
    for module, parts in by_module(lora.state).items():
        tower, name = split_tower(module)
        stem = prefixes[tower] + spelling.names.get(name, name).replace(".", "_")
        own = kind.to_file(lora.spec.of(module), parts)
        tensors |= {f"{stem}{ending}": value for ending, value in own.items()}
    of_kohya = kind.name == "lora" and not lora.spec.dora
    header = {  # what kohya's programs look for
        "ss_network_module": "networks.lora" if of_kohya else "lycoris.kohya",
        "ss_network_dim": str(lora.spec.rank),
        "ss_network_alpha": str(lora.spec.alpha),
        "base_size": lora.spec.base_size or "",
    }
    if lora.spec.dora:
        header["ss_network_args"] = json.dumps({"algo": "lora", "dora_wd": True})
    elif kind.name != "lora":
        factor = -1 if lora.spec.factor is None else lora.spec.factor
        header["ss_network_args"] = json.dumps({"algo": kind.name, "factor": factor})
    write_tensors(path, tensors, {**facts, **header})


def write_token_files(folder: Path, lora: StoredLora) -> None:
    """Write each trained token into an existing folder, as an embedding that ComfyUI finds by file name."""
    tokens = next(iter(lora.tokens.values()))
    files = token_files(tokens.strings)
    for string, row in zip(tokens.strings, tokens.rows, strict=True):
        write_tensors(folder / files[string], {"clip_g": row[None]}, {"token": string})


def write_embeddings(folder: Path, lora: StoredLora) -> None:
    """Write each new token into a file of a new folder, as `load_textual_inversion` of diffusers takes it.

    It holds the token's row by its name; of two text encoders `clip_l` and `clip_g`, each (1, D), as kohya writes it.
    """
    rows = {tower: dict(zip(tokens.strings, tokens.rows, strict=True)) for tower, tokens in lora.tokens.items()}
    first = next(iter(lora.tokens.values()))
    new = [name for name, is_new in zip(first.strings, first.is_new, strict=True) if is_new]
    if new:
        folder.mkdir(exist_ok=True)
    files = token_files(new)
    for token in new:
        if len(rows) == 1:
            tensors = {token: next(iter(rows.values()))[token]}
        else:
            tensors = {name: each[token][None] for name, each in zip(("clip_l", "clip_g"), rows.values(), strict=True)}
        write_tensors(folder / files[token], tensors, {"token": token})


def token_files(tokens: Iterable[str]) -> dict[str, str]:
    """Return the name of each token's file, a whole word's before a piece's; further equal names are numbered."""
    files: dict[str, str] = {}
    for token in sorted(tokens, key=lambda each: not each.endswith("</w>")):
        stem = re.sub(r"[^\w-]+", "", token.removesuffix("</w>")) or "token"
        numbered = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        files[token] = next(name for each in numbered if (name := f"{stem}{each}.safetensors") not in files.values())
    return files


def read_keyed(
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, Shape],
    origin: str,
    *,
    family: Family,
    given: Strength | None = None,
) -> StoredLora:
    """Read adapters under ComfyUI's, kohya's, LyCORIS's or dotted names, for a family's network with these modules.

    `given` is one strength of all, see `AdapterKind.gather`. A ConfigError names what is missing or unexpected.
    """
    kind = kind_of(tensors) or KINDS["lora"]
    found, names = _collect(tensors, kind, origin), _known_names(family, [*modules])
    adapters: dict[str, Parts] = {}
    for stem, parts in found.items():
        alpha = float(parts.get("alpha", 1.0 if given is None else given.alpha))
        if not math.isfinite(alpha):
            raise ConfigError(f"{origin}: {stem} is scaled by {alpha}; copy the file again")
        name = names.get(stem) or _text_name(stem)
        if name is None:
            raise ConfigError(foreign(origin, stem))
        adapters[name] = parts
    options, gathered = kind.gather(adapters, modules, given, origin)
    state = {f"{name}.{part}": value for name, plain in gathered.items() for part, value in plain.items()}
    targets = tuple(name for name in gathered if split_tower(name)[0] == "")
    spec = LoraSpec(targets=targets, base_size=None, kind=kind.name, **options)
    return StoredLora(spec=spec, state=state)


def _collect(tensors: Mapping[str, Tensor], kind: AdapterKind, origin: str) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((end for end in kind.endings if name.endswith(end)), None)
        if ending is None:
            raise ConfigError(f"{origin}: {name} is no part of a {kind.title} adapter; files of one kind are read")
        if ending == ".dora_scale" and tensor.ndim > 1 and tensor.shape[0] == 1 < tensor.numel():
            raise ConfigError(
                f"{origin}: {name} has a magnitude for each input (wd_on_output=False in LyCORIS), and those of outputs"
                " are read; merge it with LyCORIS"
            )
        found.setdefault(name.removesuffix(ending), {})[kind.endings[ending]] = tensor
    for stem, parts in found.items():
        if kind.lacks(parts):
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


def _text_name(stem: str) -> str | None:
    """Return our name of the text encoder's module that a stored name means; None = no module of one."""
    prefixes = dict.fromkeys(TEXT_PREFIXES, "text_encoder") | {SECOND_PREFIX: "text_encoder_2"}
    for prefix, tower in prefixes.items():
        inner = stem.removeprefix(prefix)
        if inner == stem:
            continue
        if inner == "text_projection":
            return f"{tower}.{inner}"
        if (match := _TEXT_MODULE.fullmatch(inner)) is not None:
            layer = match[2].replace("self_attn_", "self_attn.").replace("mlp_", "mlp.")
            return f"{tower}.text_model.encoder.layers.{match[1]}.{layer}"
    return stem if split_tower(stem)[0] else None


def with_one_rank(lora: StoredLora) -> StoredLora:
    """Return equal adapters of one rank and alpha: pad with zeros, multiply other scales into a factor."""
    if not lora.spec.ranks and not lora.spec.alphas:
        return lora
    kind, adapters = KINDS[lora.spec.kind], by_module(lora.state)
    whole = common([lora.spec.of(name) for name in adapters])
    raised = {name: kind.raised(parts, lora.spec.of(name), whole) for name, parts in adapters.items()}
    state = {f"{name}.{part}": value for name, parts in raised.items() for part, value in parts.items()}
    spec = replace(lora.spec, rank=whole.rank, alpha=whole.alpha, ranks={}, alphas={})
    return replace(lora, spec=spec, state=state)


def foreign(origin: str, module: str) -> str:
    """Return a sentence on an adapted module that a network lacks."""
    return f"{origin}: adapts {module}, which this model has not; choose the model= the adapter was trained on"
