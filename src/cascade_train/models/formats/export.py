"""Weights out: folders and files that other programs load, each read back and compared before it counts.

Lives here: what a run leaves in `export/`. Takes plain state dicts, gathered from their shards by the caller, on one
process. Must not live here: checkpoints for resuming (engine/), formats of adapters (formats/lora_files.py).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMWuerstchenScheduler, StableCascadePriorPipeline, StableCascadeUNet
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CLIPImageProcessor
from transformers.utils import logging as transformers_logging

from cascade_train.errors import RunError, unwritten
from cascade_train.files.durable import replacing
from cascade_train.models.formats.lora_files import (
    SINGLE_FILE,
    module_shapes,
    read_lora,
    write_peft_folder,
    write_single_file,
)
from cascade_train.models.formats.lora_files_content import StoredLora, TrainedTokens
from cascade_train.models.lora import LoraSpec
from cascade_train.models.semantic_compressor import EfficientNetCompressor
from cascade_train.models.stage_c import StageC

ROUNDINGS = 32
"""Largest allowed difference of outputs relative to the largest, in machine epsilons of the written dtype.

The tensors themselves must come back bit for bit; kernels may round otherwise where memory is aligned otherwise.
"""

PUBLISHED_RESOLUTION_MULTIPLE = 42.67
"""Pixels of the finished picture per latent position where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""

NO_ROOM = "Free space there, or give another folder; what was there before is as it was."


@dataclass(frozen=True, kw_only=True)
class PriorParts:
    """What a prior pipeline consists of, beside the weights of its network.

    Attributes:
        network_config: the network's diffusers config.
        text_encoder: the frozen `CLIPTextModelWithProjection`.
        tokenizer: its `CLIPTokenizer`.
        max_tokens: length to which captions are cut and padded.
        resolution_multiple: pixels of the finished picture per latent position.
        image_encoder: the frozen `CLIPVisionModelWithProjection`; None = no image prompts.
    """

    network_config: Mapping[str, Any]
    text_encoder: nn.Module
    tokenizer: Any
    max_tokens: int
    resolution_multiple: float
    image_encoder: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A finished export.

    Attributes:
        path: the folder.
        max_error: largest difference on the fixed input between the weights given and the weights read back,
            relative to the largest output.
    """

    path: Path
    max_error: float


def prior_parts(stage: StageC) -> PriorParts:
    """Return what a built Stage C gives to a prior pipeline; builds what a cache had made needless."""
    stage.complete()
    return PriorParts(
        network_config=network_config(stage.network),
        text_encoder=stage.text_encoder.module,
        tokenizer=stage.text_encoder.tokenizer,
        max_tokens=stage.text_encoder.max_tokens,
        resolution_multiple=resolution_multiple(stage),
        image_encoder=None if stage.image_encoder is None else stage.image_encoder.module,
    )


def resolution_multiple(stage: StageC) -> float:
    """Return the pixels of the finished picture for each of Stage C's latent positions: the compression."""
    compressor = stage.semantic_compressor
    return PUBLISHED_RESOLUTION_MULTIPLE if isinstance(compressor, EfficientNetCompressor) else float(compressor.stride)


def network_config(network: nn.Module) -> dict[str, Any]:
    """Return the diffusers config of a denoising network."""
    return dict(network.config)


def save_prior(state: Mapping[str, Tensor], parts: PriorParts, directory: Path) -> Exported:
    """Write a folder that `StableCascadePriorPipeline.from_pretrained` loads, replacing `directory` at once.

    The pipeline's scheduler is the cosine schedule with epsilon prediction; a network trained for another objective
    loads, but that scheduler does not fit it.

    Args:
        state: the network's whole state dict with diffusers' keys, on the host, in the dtype to be written.
        parts: the rest of the pipeline.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    network = build_plain_network(parts.network_config, state)
    with replaced_directory(directory) as partial, quiet():
        prior_pipeline(network, parts).save_pretrained(partial)
        error = read_back_error(network, partial / "prior", directory)
    return Exported(path=directory, max_error=error)


def prior_pipeline(network: StableCascadeUNet, parts: PriorParts) -> StableCascadePriorPipeline:
    """Return the pipeline around a network, its towers copied to the host in the network's dtype."""
    return StableCascadePriorPipeline(
        tokenizer=tokenizer_of_length(parts.tokenizer, parts.max_tokens),
        text_encoder=copy_on_host(parts.text_encoder, network.dtype),
        prior=network,
        scheduler=DDPMWuerstchenScheduler(),
        resolution_multiple=parts.resolution_multiple,
        image_encoder=None if parts.image_encoder is None else copy_on_host(parts.image_encoder, network.dtype),
        feature_extractor=_image_processor(parts.image_encoder),
    )


def read_back_error(network: StableCascadeUNet, written: Path, directory: Path) -> float:
    """Load what was written of a network, compare it, and return the relative difference of a fixed prediction.

    Args:
        network: what was written.
        written: the folder that holds it.
        directory: what the export is called, for messages.

    Raises:
        RunError: tensors or predictions differ.
    """
    loaded = StableCascadeUNet.from_pretrained(written, torch_dtype=network.dtype)
    check_equal_tensors(network.state_dict(), loaded.state_dict(), directory)
    expected, found = (fixed_prediction(each) for each in (network, loaded))
    return checked_error(expected, found, network.dtype, directory)


def save_lora(
    state: Mapping[str, Tensor],
    spec: LoraSpec,
    network_config: Mapping[str, Any],
    directory: Path,
    metadata: Mapping[str, str],
    *,
    text_encoder: Mapping[str, Tensor] | None = None,
    tokens: TrainedTokens | None = None,
) -> Exported:
    """Write adapters as peft's folder and as one file with metadata, replacing `directory` at once.

    Both are read back for a network without weights, and each adapted layer's contribution is compared.

    Args:
        state: the adapters by plain names on the host, see `lora.adapter_state`.
        spec: what they are.
        network_config: the base network's diffusers config.
        directory: appears when all is written and verified.
        metadata: further facts for the single file's header.
        text_encoder: adapters of the text encoder, likewise; None = none.
        tokens: trained vocabulary rows; None = none.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    lora = StoredLora(spec=spec, state=state, text_encoder=text_encoder or {}, tokens=tokens)
    modules = module_shapes(build_plain_network(network_config, None))
    with replaced_directory(directory) as partial:
        write_peft_folder(partial, lora)
        write_single_file(partial / SINGLE_FILE, lora, metadata)
        sources = (partial, partial / SINGLE_FILE)
        error = max(
            lora_error(lora, read_lora(str(each), key="export", modules=modules), directory) for each in sources
        )
    return Exported(path=directory, max_error=error)


def lora_error(expected: StoredLora, found: StoredLora, path: Path) -> float:
    """Return the largest difference of two files' contributions to a fixed input, relative to the largest.

    Compares every adapted layer of network and text encoder, DoRA's magnitudes, and the trained tokens.

    Raises:
        RunError: more than rounding.
    """
    if (expected.tokens is None) != (found.tokens is None):
        raise RunError(f"{path}: trained tokens read back differently from what was written; nothing was kept")
    pairs = [(_outputs(expected.state, expected.spec), _outputs(found.state, found.spec))]
    pairs.append((_outputs(expected.text_encoder, expected.spec), _outputs(found.text_encoder, found.spec)))
    if expected.tokens is not None and found.tokens is not None:
        pairs.append(
            (
                dict(zip(expected.tokens.strings, expected.tokens.rows, strict=True)),
                dict(zip(found.tokens.strings, found.tokens.rows, strict=True)),
            )
        )
    errors = [0.0]
    for wanted, got in pairs:
        if wanted.keys() - got.keys() or any(bool(got[name].any()) for name in got.keys() - wanted.keys()):
            raise RunError(f"{path}: other modules are adapted than were written; nothing was kept")
        if wanted:
            a, b = (torch.cat([each[name].float().flatten() for name in wanted]) for each in (wanted, got))
            errors.append(checked_error(a, b, torch.float32, path))
    return max(errors)


def _outputs(state: Mapping[str, Tensor], spec: LoraSpec) -> dict[str, Tensor]:
    """Return (alpha / rank) B A x of each adapted module for a fixed x, and the magnitudes, by name."""
    outputs = {n: v for n, v in state.items() if ".lora_magnitude_vector." in n}
    for name in dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in state):
        outputs[name] = fixed_contribution(state, name, spec)
    return outputs


def build_plain_network(config: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> StableCascadeUNet:
    """Return diffusers' own class around `state` (sharing its memory); None = on the meta device."""
    with torch.device("meta"):
        network = StableCascadeUNet.from_config({k: v for k, v in config.items() if not k.startswith("_")})
    if state is not None:
        network.load_state_dict(state, strict=True, assign=True)
    return network.eval()


@torch.no_grad()
def fixed_prediction(network: nn.Module) -> Tensor:
    """Return the prediction (1, C, H, W) of a network on a fixed latent and fixed conditions, as fp32.

    The latent is the smallest that every level can halve; 4 x 4 for Stage C.
    """
    config, dtype, generator = network.config, network.dtype, torch.Generator().manual_seed(0)
    is_stage_c = config.clip_text_in_channels is not None
    side = 4 if is_stage_c else config.patch_size * 2 ** (len(config.block_out_channels) - 1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    latent = draw(1, config.in_channels, side, side)
    conditions = {"clip_text_pooled": draw(1, 1, config.clip_text_pooled_in_channels)}
    if is_stage_c:
        conditions["clip_text"] = draw(1, 5, config.clip_text_in_channels)
        conditions["clip_img"] = draw(1, 1, config.clip_image_in_channels)
    else:
        conditions["effnet"] = draw(1, config.effnet_in_channels, 2, 2)
    return network(latent, torch.full((1,), 0.5, dtype=dtype), **conditions, return_dict=False)[0].float()


def fixed_contribution(state: Mapping[str, Tensor], name: str, spec: LoraSpec) -> Tensor:
    """Return (alpha / rank) B A x of one adapted module for a fixed x, flat, from plain tensors."""
    down, up = (state[f"{name}.lora_{half}.weight"].float().flatten(1) for half in ("A", "B"))
    return spec.alpha / spec.rank * (up @ (down @ _fixed_input(down.shape[1])))


def _fixed_input(width: int) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(0))


def checked_error(expected: Tensor, found: Tensor, dtype: torch.dtype, directory: Path) -> float:
    """Return the largest difference relative to the largest expected value.

    Raises:
        RunError: more than rounding.
    """
    scale = max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
    error = float((expected - found).abs().max()) / scale
    if not error <= ROUNDINGS * torch.finfo(dtype).eps:
        raise RunError(
            f"{directory}: what was written reads back with a relative error of {error:.3g}; nothing was kept"
        )
    return error


def check_equal_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], directory: Path) -> None:
    """Compare tensors bit for bit.

    Raises:
        RunError: names the first that differs.
    """
    for name in expected.keys() | found.keys():
        if name not in expected or name not in found or not torch.equal(expected[name], found[name]):
            raise RunError(f"{directory}: {name} reads back differently from what was written; nothing was kept")


def copy_on_host(tower: Any, dtype: torch.dtype) -> Any:
    """Return a CLIP tower of the network's dtype on the host: the pipeline feeds the network what the towers give."""
    with torch.device("meta"):
        copied = type(tower)(tower.config)
    state = {name: value.to(device="cpu", dtype=dtype) for name, value in tower.state_dict().items()}
    copied.load_state_dict(state, strict=True, assign=True)
    return copied.eval()


def tokenizer_of_length(tokenizer: Any, max_tokens: int) -> Any:
    """Return a copy that pads to `max_tokens`: the pipeline knows no other place for that length."""
    copied = copy.deepcopy(tokenizer)
    copied.model_max_length = max_tokens
    return copied


def _image_processor(image_encoder: nn.Module | None) -> CLIPImageProcessor | None:
    if image_encoder is None:
        return None
    side = image_encoder.config.image_size
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep diffusers' notice of deprecation and transformers' progress bar out of the run's output."""
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
    """Yield a file name beside `path` that takes its place when the block succeeds, else vanishes.

    Raises:
        RunError: it could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise RunError(f"{unwritten(path, error)}. {NO_ROOM}") from error


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty folder beside `directory` that takes its place when the block succeeds, else vanishes.

    Raises:
        RunError: it could not be written.
    """
    partial, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{unwritten(directory, error)}. {NO_ROOM}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
