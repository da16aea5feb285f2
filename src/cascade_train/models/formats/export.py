"""Weights out: files and folders that other programs load, each read back and compared before it replaces another.

Takes plain state dicts, gathered from their shards, on one process. Must not live here: pipelines
(export_pipelines.py), adapters (export_lora.py), checkpoints (engine/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cascade_train.errors import RunError, unwritten
from cascade_train.files import output
from cascade_train.files.output import EXPORTER, MARK
from cascade_train.models.family import Family
from cascade_train.models.formats.weights import copy_to, open_weights, write_tensors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

ROUNDINGS = 32
"""Largest allowed difference of outputs relative to the largest, in machine epsilons of the written dtype.

Tensors must be equal bit for bit; kernels round differently where memory is aligned differently.
"""

NO_ROOM = "Free space there, or give another folder; what was there before is as it was."

PART_FILE = "model.safetensors"

_PROBE_PX = 32


def model_spec(own: Mapping[str, str], title: str, *, is_lora: bool) -> dict[str, str]:
    """Return the entries of a header by Stability's ModelSpec 1.0.1; `own` is of `Family.model_spec`."""
    architecture = own["modelspec.architecture"]
    return {
        **own,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora" if is_lora else architecture,
        "modelspec.title": title,
        MARK: EXPORTER,
    }


def build_plain_network(family: Family, config: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> Any:
    """Return diffusers' own class around `state` (sharing its memory); None = on the meta device."""
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    network = module_around(lambda: family.network_class().from_config(own), state)
    network.family = family
    return network


def module_around(make: Callable[[], Any], state: Mapping[str, Tensor] | None) -> Any:
    """Return the module that is made, around `state` (sharing its memory), in eval mode; None = on the meta device."""
    with torch.device("meta"):
        module = make()
    if state is not None:
        module.load_state_dict(state, strict=True, assign=True)
    return module.eval()


def copy_on_host(tower: Any, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> Any:
    """Return a copy of a CLIP tower on the host, as pipelines need it, with other values if they are given."""
    return module_around(lambda: type(tower)(tower.config), on_host(tower, dtype, state))


def on_host(module: nn.Module, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of a module's tensors, or of other values for it, in a dtype on the host, by name."""
    values = module.state_dict() if state is None else state
    return {name: copy_to(value, dtype, torch.device("cpu")) for name, value in values.items()}


def save_network(
    family: Family,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    out: Path,
    *,
    format: str,
    command: str = EXPORTER,
) -> float:
    """Write a denoising network's weights alone as a command's output; return the largest relative difference.

    `state` is the whole state dict with diffusers' keys, on the host, in the dtype to be written. `format`: "diffusers"
    makes a folder, "original" a file that ends in `.safetensors`, which not every family has (ConfigError). A RunError
    where it reads back differently.
    """
    stored_state = family.original_state(state) if format == "original" else {}
    network, predict = build_plain_network(family, config, state), partial(fixed_prediction, family)
    with replaced_directory(out, command) if format == "diffusers" else replaced_file(out) as place:
        if format == "diffusers":
            network.save_pretrained(place)
        else:
            write_tensors(place, stored_state, {"format": "pt", MARK: command})
        layout = family.layout(config)
        with open_weights(str(place), key="export", layout=layout) as tensors:  # mapped into memory, not copied
            stored = dict(tensors.items())
            check_equal_tensors(state, stored, out)
            loaded = build_plain_network(family, config, stored)
            return checked_error(predict(network), predict(loaded), network.dtype, out)


def save_part(state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a frozen part into a folder that replaces `directory` at once, and compare it; return 0, its error."""
    tensors = {name: value.contiguous() for name, value in state.items()}
    with replaced_directory(directory) as partial:
        save_file(tensors, partial / PART_FILE, metadata={"format": "pt"})
        check_equal_tensors(tensors, load_file(partial / PART_FILE), directory)
    return 0.0


@torch.no_grad()
def fixed_prediction(family: Family, network: nn.Module) -> Tensor:
    """Return the prediction (1, C, H, W) of a network on a fixed latent and fixed conditions, as fp32."""
    dtype, generator = network.dtype, torch.Generator().manual_seed(0)
    inputs, named = family.probe(network.config, lambda *shape: torch.randn(*shape, generator=generator).to(dtype))
    return network(*inputs, **named, return_dict=False)[0].float()


@torch.no_grad()
def reconstruction(model: nn.Module) -> Tensor:
    """Return the reconstruction of a fixed picture by an autoencoder of diffusers, (1, 3, H, W)."""
    return model(torch.rand(1, 3, _PROBE_PX, _PROBE_PX, generator=torch.Generator().manual_seed(0))).sample


def save_model(model: Any, directory: Path, output: Callable[[nn.Module], Tensor]) -> float:
    """Write a folder that the model's class loads, replacing `directory`; return the error, see `read_back_error`."""
    with replaced_directory(directory) as place, quiet():
        model.save_pretrained(place)
        loaded = type(model).from_pretrained(place, torch_dtype=model.dtype)
        return read_back_error(model, loaded.eval(), directory, output)


def read_back_error(written: nn.Module, loaded: nn.Module, out: Path, output: Callable[[nn.Module], Tensor]) -> float:
    """Compare a module with the one read back (RunError); return the relative difference of a fixed output."""
    check_equal_tensors(written.state_dict(), loaded.state_dict(), out)
    return checked_error(output(written), output(loaded), written.dtype, out)


def checked_error(expected: Tensor, found: Tensor, dtype: torch.dtype, out: Path) -> float:
    """Return the largest difference relative to the largest expected value; a RunError if it is not rounding."""
    scale = max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
    error = float((expected - found).abs().max()) / scale
    if not error <= ROUNDINGS * torch.finfo(dtype).eps:
        raise RunError(f"{out}: what was written reads back with a relative error of {error:.3g}; nothing was kept")
    return error


def check_equal_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], out: Path) -> None:
    """Compare tensors bit for bit; a RunError names one that differs."""
    for name in expected.keys() | found.keys():
        if name not in expected or name not in found or not torch.equal(expected[name], found[name]):
            raise RunError(f"{out}: {name} reads back differently from what was written; nothing was kept")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep diffusers' notice of deprecation and transformers' progress bar out of the run's output."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    verbosity, bars = diffusers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    diffusers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """As `output.replaced_file`, with a RunError if the file cannot be written."""
    try:
        with output.replaced_file(path) as place:
            yield place
    except (OSError, SafetensorError) as error:
        raise RunError(f"{unwritten(path, error)}. {NO_ROOM}") from error


@contextmanager
def replaced_directory(directory: Path, command: str = EXPORTER) -> Iterator[Path]:
    """As `output.replaced_folder`, with a RunError if the folder cannot be written."""
    try:
        with output.replaced_folder(directory, command) as place:
            yield place
    except (OSError, SafetensorError) as error:
        raise RunError(f"{unwritten(directory, error)}. {NO_ROOM}") from error
