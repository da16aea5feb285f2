"""Adapters out: in each format, read back and compared, or merged into a network's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError, RunError
from cascade_train.files.output import EXPORTER, MARK, remove_written
from cascade_train.models.adapters.kind import Parts
from cascade_train.models.adapters.kinds import KINDS, by_module
from cascade_train.models.family import Family
from cascade_train.models.formats.export import (
    build_plain_network,
    checked_error,
    model_spec,
    replaced_directory,
    replaced_file,
)
from cascade_train.models.formats.lora_files import (
    DIFFUSERS_FILE,
    module_shapes,
    read_lora,
    write_diffusers_file,
    write_peft_folder,
)
from cascade_train.models.formats.lora_files_keyed import write_embeddings, write_keyed, write_token_files
from cascade_train.models.lora import StoredLora

log = logging.getLogger(__name__)


def save_lora(
    lora: StoredLora,
    family: Family,
    network_config: Mapping[str, Any],
    directory: Path,
) -> float:
    """Write adapters as peft's folder, with a file for diffusers' pipelines where these load any of the family.

    Both are read back for a network of that diffusers config, and each layer's contribution is compared (RunError).
    """
    modules = module_shapes(build_plain_network(family, network_config, None))
    read = partial(read_lora, key="export", family=family, modules=modules)
    with replaced_directory(directory) as place:
        write_peft_folder(place, lora)
        errors = [lora_error(lora, read(str(place)), directory)]
        if family.lora_root is not None and lora.spec.kind == "lora":
            write_diffusers_file(place, lora, family.lora_root)
            again = read(str(place / DIFFUSERS_FILE))
            errors.append(lora_error(replace(lora, tokens={}), again, directory))
        if family.lora_root is not None and lora.tokens:
            write_embeddings(place / "embeddings", lora)
        return max(errors)


def check_format(format: str, *, dora: bool) -> None:
    """Refuse a format whose program computes otherwise than was trained."""
    if dora and format == "comfyui":
        raise ConfigError(
            "format=comfyui: ComfyUI divides by the norms of the base's weights, DoRA by those of the adapted weights, "
            "and no file tells it otherwise; merge the adapters into weights: cascade-train merge lora=…"
        )


def export_lora(
    lora: StoredLora,
    network: Any,
    out: Path,
    *,
    format: str,
    title: str = "LoRA",
    prediction: str | None = None,
) -> float:
    """Write adapters of a network, which may lie on meta, in one of its family's `lora_formats`, replacing `out`.

    `out` is a folder for "peft", else a file that ends in `.safetensors`. Trained tokens are written as embeddings in
    `<stem>.embeddings` where the format does not support them; a ConfigError for anything else that it does not.
    The headers of "comfyui" and "kohya" have `model_spec`, with `prediction` as of the family's. A RunError where it
    reads back differently.
    """
    family: Family = network.family
    if format == "peft":
        return save_lora(lora, family, network.config, out)
    modules, keyed = module_shapes(network), format in ("comfyui", "kohya")
    check_format(format, dora=lora.spec.dora)
    if lora.spec.dora and format == "kohya":
        log.warning("%s: LyCORIS computes what was trained; ComfyUI and A1111 take other norms: merge for these.", out)
    first = lora.tokens.get("text_encoder")
    if keyed and first is not None and family.lora_root is not None and not all(first.is_new):
        old = [name for name, is_new in zip(first.strings, first.is_new, strict=True) if not is_new]
        raise ConfigError(
            f"format={format}: has no place for tokens of the vocabulary that were trained ({', '.join(old)}), only "
            "for new ones; use format=peft, which holds them"
        )
    with replaced_file(out) as place:
        if keyed:
            own = family.model_spec(network.config, is_lora=True, prediction=prediction)
            header = model_spec(own, title, is_lora=True)
            write_keyed(place, lora, header, spelling=family.spelling(format, [*modules]))
        else:
            family.write_numbered_lora(place, lora, modules, {MARK: EXPORTER})
        expected = replace(lora, tokens={}) if keyed else lora
        found = read_lora(str(place), key="export", family=family, modules=modules)
        error = lora_error(expected, found, out)
    folder = out.with_name(f"{out.stem}.embeddings")
    if keyed and not lora.tokens:
        remove_written(folder, EXPORTER)  # of other adapters
    elif keyed:
        with replaced_directory(folder) as place:
            (write_token_files if family.lora_root is None else write_embeddings)(place, lora)
    return error


def lora_error(expected: StoredLora, found: StoredLora, path: Path) -> float:
    """Return the largest relative difference of two files' contributions to a fixed input.

    Compares every adapted layer of network and text encoders, DoRA's magnitudes, and the trained tokens; a RunError
    where the files have other layers or tokens.
    """
    if expected.tokens.keys() != found.tokens.keys():
        raise RunError(f"{path}: trained tokens read back differently from what was written; nothing was kept")
    ours, theirs, errors = _contributions(expected), _contributions(found), [0.0]
    for kind in ours.keys() | theirs.keys():
        wanted, got = ours.get(kind, {}), theirs.get(kind, {})
        if wanted.keys() - got.keys() or any(bool(got[name].any()) for name in got.keys() - wanted.keys()):
            raise RunError(f"{path}: other modules are adapted than were written; nothing was kept")
        if wanted:
            a, b = (torch.cat([each[name].float().flatten() for name in wanted]) for each in (wanted, got))
            errors.append(checked_error(a, b, torch.float32, path))
    return max(errors)


def _contributions(lora: StoredLora) -> dict[str, dict[str, Tensor]]:
    """Return changes times a fixed input and magnitudes of network and text encoders, and rows of tokens, by name."""
    tokens = lora.tokens.items()
    rows = {f"tokens of {tower}": dict(zip(each.strings, each.rows, strict=True)) for tower, each in tokens}
    outputs = {name: value for name, value in lora.state.items() if ".lora_magnitude_vector." in name}
    for name, parts in by_module(lora.state).items():
        outputs[name] = KINDS[lora.spec.kind].output(lora.spec.of(name), parts)
    return replace(lora, state=outputs).by_root() | rows


@torch.no_grad()
def merged(weight: Tensor, name: str, adapters: Iterable[tuple[StoredLora, Mapping[str, Parts], float]]) -> Tensor:
    """Weight of a module with adapters, one after the other, in fp32.

    W becomes W + strength (W' - W), W' being the adapted weight: with DoRA its outputs have the trained magnitudes.
    """
    weight = weight.float()
    for lora, parts, strength in adapters:
        if name in parts:
            kind = KINDS[lora.spec.kind]
            weight = weight + strength * kind.change(lora.spec.of(name), parts[name], weight)
    return weight


def read_changes(
    network: nn.Module, sources: Sequence[str], strengths: Sequence[float], **reading: Any
) -> Callable[[str, Tensor], Tensor]:
    """Read adapters (see `read_lora`); returns what a stored tensor of the network becomes with them, by its name.

    Sums are fp32 whatever the dtype of the weights, so that they are rounded once, where they are written.
    """
    adapters = []
    for source, strength in zip(sources, strengths, strict=True):
        lora = read_lora(source, family=network.family, modules=module_shapes(network), **reading)
        if lora.tokens or len(lora.by_root()) > 1:
            log.warning("%s: only what belongs to the network is merged; its text encoder part stays with it.", source)
        adapters.append((lora, by_module(lora.by_root()[""]), strength))
    changed = {f"{name}.weight" for lora, _, _ in adapters for name in lora.spec.targets}
    return lambda name, value: merged(value, name.removesuffix(".weight"), adapters) if name in changed else value
