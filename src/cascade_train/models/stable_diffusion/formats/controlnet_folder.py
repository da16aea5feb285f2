"""Control networks of Stable Diffusion on disk: diffusers' folder, whose file says in its header what made the maps.

Must not live here: those of Stage C (controlnet_files.py), and what a control network is (networks/).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import parsing, stored_mapping
from cascade_train.models.family import Layout, Stored, own_names
from cascade_train.models.formats.export import quiet, read_back_error, replaced_directory
from cascade_train.models.formats.weights import open_weights, write_tensors
from cascade_train.models.formats.weights_source import find_weight_files

PART = "controlnet"
FILE_NAME = "diffusion_pytorch_model.safetensors"
FILTER = "filter"
"""Key of the header: the filter's configuration node, as JSON."""

FIRST_LAYER = "controlnet_cond_embedding.conv_in.weight"
"""What every control network has, of any family of diffusers' UNets."""

UNSEEN = {"controlnet_conditioning_channel_order": "rgb", "global_pool_conditions": False}
"""Options of diffusers' control networks that no tensor shows, and the values that networks have here."""


@dataclass(frozen=True, kw_only=True)
class StoredControlNet:
    """A control network as files hold it; its state dict, under diffusers' names, lies on the host.

    Attributes:
        channels: of the maps that it takes.
        filter: the configuration node of the filter that made its maps; None = unknown.
    """

    state: Mapping[str, Tensor]
    channels: int
    filter: Mapping[str, Any] | None


def read_controlnet(source: str, config: Mapping[str, Any], *, key: str) -> StoredControlNet:
    """Read a control network for a UNet of this diffusers config.

    `source` is a run, its export, a folder of diffusers, a single file of diffusers' names or the original's, or one of
    these on the hub. A ConfigError names `key`.
    """
    origin = f"{key}={source}"
    with open_weights(source, key=key, part=PART, layout=_layout(config)) as tensors:
        names = list(tensors.shapes())
        if FIRST_LAYER not in names:
            raise ConfigError(
                f"{origin}: holds no control network of Stable Diffusion, but {', '.join(names[:2]) or 'nothing'}; "
                "name a run of task=controlnet, or a folder or file of one"
            )
        state = {name: tensors.read(name).float().clone() for name in names}
    file = find_weight_files(source, key=key, part=PART)[0]
    _check_unseen(file.parent / "config.json", origin)
    header: dict[str, str] = {}
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stored:
            header = stored.metadata() or {}
    with parsing(f"{origin}:"):
        made_by = json.loads(header[FILTER]) if FILTER in header else None
    return StoredControlNet(state=state, channels=state[FIRST_LAYER].shape[1], filter=made_by)


def _check_unseen(path: Path, origin: str) -> None:
    """Refuse a network whose configuration, where there is one, says what its tensors do not and what is not here."""
    stored = stored_mapping(path)
    for name, usual in UNSEEN.items():
        if stored.get(name, usual) != usual:
            raise ConfigError(
                f"{origin}: has {name}={stored[name]} in its config.json, and control networks have {usual} here; name "
                "another"
            )


def _layout(config: Mapping[str, Any]) -> Layout:
    """Return how the names of stored tensors become diffusers'."""

    def layout(stored_names: Iterable[str]) -> dict[str, Stored]:
        names = list(stored_names)
        if not any("zero_convs." in name for name in names):
            return own_names(names)
        from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint  # heavy

        converted = convert_controlnet_checkpoint({name: name for name in names}, config)  # renames, reads no tensor
        return {name: Stored(stored) for name, stored in converted.items() if stored is not None}

    return layout


def save_controlnet(
    config: Mapping[str, Any], state: Mapping[str, Tensor], made_by: Mapping[str, Any], directory: Path
) -> float:
    """Write a folder that `ControlNetModel.from_pretrained` loads, replacing `directory` at once.

    `made_by` is the configuration node of the maps' filter. Returns the relative difference of what the network makes
    of a fixed map after reading it back; a RunError leaves `directory` as it was.
    """
    from diffusers import ControlNetModel

    with torch.device("meta"):
        network = ControlNetModel.from_config({n: value for n, value in config.items() if not n.startswith("_")})
    network.load_state_dict(state, strict=True, assign=True)
    with replaced_directory(directory) as partial, quiet():
        network.save_config(partial)
        write_tensors(partial / FILE_NAME, state, {"format": "pt", FILTER: json.dumps(made_by)})
        loaded = ControlNetModel.from_pretrained(partial, torch_dtype=network.dtype)
        return read_back_error(network.eval(), loaded.eval(), directory, _fixed_output)


@torch.no_grad()
def _fixed_output(network: nn.Module) -> Tensor:
    """Return the features of a fixed map, flat: what comes of them may still be zero."""
    embedding: Any = network.get_submodule("controlnet_cond_embedding")
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.rand(1, embedding.conv_in.in_channels, 16, 16, generator=generator).to(
        embedding.conv_in.weight.dtype
    )
    for layer in (embedding.conv_in, *embedding.blocks):
        x_BCHW = nn.functional.silu(layer(x_BCHW))
    return x_BCHW.float().flatten()
