"""Stage C under a control network: features of the map alone, added in front of some residual blocks.

Stored as the original's one file, with a header for what the original leaves out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import parsing
from cascade_train.models.cascade.networks.controlnet import (
    ControlNetwork,
    ControlSpec,
    block_widths,
    build_control_network,
    mirrored_blocks,
)
from cascade_train.models.cascade.networks.efficientnet import load_features
from cascade_train.models.control import Conditions, Control, ControlOptions, ControlResiduals, repeated
from cascade_train.models.formats.export import check_equal_tensors, module_around, replaced_directory
from cascade_train.models.formats.weights import read_tensors, shapes_of, write_tensors
from cascade_train.models.formats.weights_source import find_part, find_weight_files

if TYPE_CHECKING:
    from cascade_train.models.cascade.networks.unet import CascadeUNet

FORMAT = "cascade_train.controlnet/1"
PART = "controlnet"
FILE_NAME = "controlnet.safetensors"
PUBLISHED_BLOCKS = "[0,4,8,12,51,55,59,63]"
"""Of the original's canny, inpainting and super_resolution, and the only ones of ComfyUI, of this width."""

_COMFYUI_WIDTH = 2048
log = logging.getLogger(__name__)

_CHARACTERISTIC = {
    "backbone.0.0.weight": "effnet",
    "backbone.10.blocks.0.weight": "large",
    "backbone.8.weight": "small",
    "backbone.2.weight": "simple",
}
"""A tensor's name -> the only bottleneck that has it, if none before it is there."""


@dataclass(frozen=True, kw_only=True)
class StoredControl:
    """A control network as a file holds it; its state dict lies on the host.

    Attributes:
        base_size: the `model=` name of the network that it controls; None = no published size, or unknown.
        filter: the configuration node of the filter that made its maps; None = unknown.
    """

    spec: ControlSpec
    state: Mapping[str, Tensor]
    base_size: str | None = None
    filter: Mapping[str, Any] | None = None


class FeatureControl(Control):
    """A `ControlNetwork` beside a `CascadeUNet`. What it adds depends neither on the latents nor on the noise level."""

    module: ControlNetwork

    def __init__(self, network: CascadeUNet, options: ControlOptions, device: torch.device) -> None:
        self._widths = block_widths(network.config)
        self._base_size = network.family.size_of(shapes_of(dict(network.named_parameters())))
        super().__init__(options, device)

    def _new(self) -> ControlNetwork:
        widths, chosen = self._widths, self.options.blocks
        blocks = mirrored_blocks(len(widths)) if chosen is None else tuple(chosen)
        _check_blocks(blocks, len(widths), f"task.blocks={list(blocks)}")
        spec = ControlSpec(
            channels=self.options.channels,
            bottleneck=self.options.bottleneck,
            blocks=blocks,
            widths=tuple(widths[block] for block in blocks),
        )
        network = build_control_network(spec, device=self.device, seed=self.options.seed)
        if self.options.backbone_weights is not None:
            load_features(network.backbone, self.options.backbone_weights, key="task.backbone_weights")
        return network

    def load(self, source: str, *, key: str) -> None:
        """Take the network of a run, its export or a file, ours or the original's."""
        stored, origin = read_control(source, key=key, blocks=self.options.blocks), f"{key}={source}"
        spec, widths = stored.spec, self._widths
        if set(spec.widths) <= set(widths):
            _check_blocks(spec.blocks, len(widths), f"{origin} with the blocks {list(spec.blocks)}")
        if spec.widths != tuple(widths[block] if 0 <= block < len(widths) else None for block in spec.blocks):
            fits = {2048: "; use model=c_3b", 1536: "; use model=c_1b"}.get(spec.widths[0], "")
            raise ConfigError(
                f"{origin}: this control network is for blocks {list(spec.blocks)} of width {spec.widths[0]}, the "
                f"model has {len(widths)} of width {widths[0]}{fits}"
            )
        self._check_maps(spec.channels, stored.filter, origin)
        if spec.bottleneck != self.options.bottleneck:
            raise ConfigError(f"{origin}: this control network has task.bottleneck={spec.bottleneck}; set it so")
        self.module = module_around(lambda: ControlNetwork(spec), stored.state).float().to(self.device)

    def residuals(self, control_BCHW: Tensor) -> ControlResiduals:
        """Return the features of maps (B, C, h, w), made once."""
        features = self.module(control_BCHW)

        def residuals(noised_BCHW: Tensor, _timestep_B: Tensor, _cond: Conditions) -> dict[int, Tensor]:
            return {block: repeated(value, len(noised_BCHW)) for block, value in features.items()}

        return residuals

    def write(self, state: Mapping[str, Tensor], directory: Path) -> float:
        """Write a folder with one file in the original's layout and our metadata."""
        spec, made_by = self.module.spec, self.options.filter
        return save_control(StoredControl(spec=spec, state=state, base_size=self._base_size, filter=made_by), directory)


def _check_blocks(blocks: Sequence[int], executed: int, origin: str) -> None:
    if unknown := [block for block in blocks if not 0 <= block < executed]:
        raise ConfigError(
            f"{origin}: this model executes {executed} residual blocks, 0 to {executed - 1}, and {unknown[0]} is none "
            "of them; name others, or choose a deeper model"
        )


def read_control(source: str, *, key: str, blocks: Sequence[int] | None = None) -> StoredControl:
    """Read a control network of ours or of the original.

    `source` is a run, its export, a file, or one on the hub (`owner/name:folder/file.safetensors`); `blocks` are those
    that it controls, where the file does not say. A ConfigError names `key`.
    """
    origin = f"{key}={source}"
    header, tensors = read_tensors(_find(source, key), key, what="control network")
    bottleneck = next((name for tensor, name in _CHARACTERISTIC.items() if tensor in tensors), None)
    outer = [name for name in tensors if name.startswith("projections.") and name.endswith(".2.weight")]
    if bottleneck is None or not outer:
        first = ", ".join(list(tensors)[:2]) or "nothing"
        raise ConfigError(f"{origin}: holds no control network, but {first}; name a controlnet.safetensors")
    with parsing(f"{origin}:"):
        stem = next(name for name in ("backbone.0.0.weight", "backbone.0.weight") if name in tensors)
        channels = tensors[stem].shape[1]
        kind = f"{len(outer)} projections of task.bottleneck={bottleneck} for maps of {channels} channels"
        spec = ControlSpec(
            channels=channels,
            bottleneck=bottleneck,
            blocks=_blocks(header, blocks, len(outer), f"{origin}: holds {kind}"),
            widths=tuple(tensors[f"projections.{i}.2.weight"].shape[0] for i in range(len(outer))),
        )
        maps = json.loads(header["filter"]) if "filter" in header else None
        return StoredControl(spec=spec, state=tensors, base_size=header.get("base_size") or None, filter=maps)


def _find(source: str, key: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_dir():
        return find_weight_files(source, key=key, part=None)[0]
    folder = find_part(path, PART, key)
    if not (folder / FILE_NAME).is_file():
        raise ConfigError(f"{key}={source}: no {FILE_NAME} in {folder}; name a run of task=controlnet, or a file")
    return folder / FILE_NAME


def _blocks(header: Mapping[str, str], given: Sequence[int] | None, count: int, holds: str) -> tuple[int, ...]:
    if "blocks" in header:
        stored = tuple(json.loads(header["blocks"]))
        if given is not None and tuple(given) != stored:
            raise ConfigError(
                f"{holds}, which control the blocks {list(stored)}, not task.blocks={list(given)}; leave "
                "task.blocks=null"
            )
        return stored
    if given is None:
        raise ConfigError(
            f"{holds}, and does not say which blocks they control or which filter made the maps; set task.blocks to "
            f"these {count} indices, in their order, task.bottleneck and filter@task.filter. The original's published "
            f"files have task.blocks={PUBLISHED_BLOCKS}; canny is of the filter canny, inpainting of inpaint, "
            "super_resolution of sr_effnet"
        )
    if len(given) != count:
        raise ConfigError(
            f"{holds}, task.blocks={list(given)} names {len(given)} blocks; name as many, in the order of the file"
        )
    return tuple(given)


def save_control(stored: StoredControl, directory: Path) -> float:
    """Write a control network, replacing `directory` at once, and compare what reads back; return 0, its error."""
    blocks, widths = [*stored.spec.blocks], {*stored.spec.widths}
    if stored.base_size is not None and (blocks != json.loads(PUBLISHED_BLOCKS) or widths != {_COMFYUI_WIDTH}):
        text = "%s: ComfyUI applies a control network right at blocks %s of Stage C 3.6B alone, not at %s of %s."
        log.warning(text, directory, PUBLISHED_BLOCKS, blocks, stored.base_size)
    header = {
        "format": FORMAT,
        "base_size": stored.base_size or "",
        "blocks": json.dumps(stored.spec.blocks),
        "bottleneck": stored.spec.bottleneck,
        "channels": str(stored.spec.channels),
        "filter": json.dumps(stored.filter),
    }
    with replaced_directory(directory) as partial:
        write_tensors(partial / FILE_NAME, stored.state, header)
        found = read_control(str(partial / FILE_NAME), key="export")
        check_equal_tensors(stored.state, found.state, directory)
    return 0.0
