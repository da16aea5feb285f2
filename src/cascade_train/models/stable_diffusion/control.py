"""Stable Diffusion under a control network: a copy of the UNet's way down that sees the map too (Zhang et al. 2023).

Stored as diffusers' folder, whose file names in its header the filter that made the maps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import ControlNetModel
from safetensors import safe_open
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import parsing, stored_mapping
from cascade_train.models.control import Conditions, Control, ControlOptions, ControlResiduals, repeated
from cascade_train.models.formats.export import check_equal_tensors, module_around, quiet, replaced_directory
from cascade_train.models.formats.weights import check_fit, open_weights, shapes_of, write_tensors
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.initialize import ZEROS, DrawnValues, Fill, materialise, torch_rule
from cascade_train.models.stable_diffusion.formats.single_file import original_layout
from cascade_train.models.stable_diffusion.networks.unet import ConditionControlNet, empty_controlnet

if TYPE_CHECKING:
    from cascade_train.models.stable_diffusion.stage import StableDiffusion

OWN = "controlnet_"
"""Beginning of the names of what the UNet has not: features of the map, and the layers that begin at zero."""

PART = "controlnet"
FILE_NAME = "diffusion_pytorch_model.safetensors"
FILTER = "filter"
"""Key of the header: the filter's configuration node, as JSON."""

FIRST_LAYER = "controlnet_cond_embedding.conv_in.weight"
"""What every control network has, of any family of diffusers' UNets."""

UNSEEN = {"controlnet_conditioning_channel_order": "rgb", "global_pool_conditions": False}
"""Options of diffusers' control networks that no tensor shows, and the values that networks have here."""


class UNetControl(Control):
    """A `ConditionControlNet` beside a `ConditionUNet`, whose values a new one has. Grey maps get three channels."""

    module: ConditionControlNet

    def __init__(self, stage: StableDiffusion, options: ControlOptions, device: torch.device) -> None:
        self._stage = stage
        super().__init__(options, device)

    def _new(self) -> ConditionControlNet:
        network = self._empty()
        materialise(network, self.device, torch.float32)
        of_torch = torch_rule(network)

        def rule(name: str, parameter: nn.Parameter) -> Fill:
            begins_at_zero = not name.startswith("controlnet_cond_embedding.") or ".conv_out." in name
            return ZEROS if begins_at_zero else of_torch(name, parameter)

        shares = {name: (parameter, 0) for name, parameter in network.named_parameters()}
        own = {name: share for name, share in shares.items() if name.startswith(OWN)}
        DrawnValues(network, rule, seed=self.options.seed).fill(own)
        self._stage.fill({name: share for name, share in shares.items() if name not in own})
        return network

    def _empty(self) -> ConditionControlNet:
        return empty_controlnet(self._stage.network, channels=self._channels(), stride=self._stage.vae.stride)

    def _channels(self) -> int:
        return 3 if self.options.channels == 1 else self.options.channels  # of grey maps: pipelines give pictures

    def load(self, source: str, *, key: str) -> None:
        """Take the network of a run, its export, or one of diffusers or the original code."""
        origin = f"{key}={source}"
        state, made_by = read_controlnet(source, dict(self._stage.network.config), key=key)
        self._check_maps(state[FIRST_LAYER].shape[1], made_by, origin)
        network = self._empty()
        what, remedy = "no control network of this model", "choose the model= that it was trained on"
        check_fit(shapes_of(network.state_dict()), shapes_of(state), origin, what=what, remedy=remedy)
        network.load_state_dict(state, assign=True)
        self.module = nn.Module.to(network, device=self.device, dtype=torch.float32)

    def residuals(self, control_BCHW: Tensor) -> ControlResiduals:
        """Return what the network makes of latents, noise level and conditions under maps (B, C, H, W)."""
        channels = self._channels()
        map_BCHW = control_BCHW.expand(-1, channels, -1, -1) if control_BCHW.shape[1] == 1 else control_BCHW

        def residuals(noised_BCHW: Tensor, timestep_B: Tensor, cond: Conditions) -> dict[int, Tensor]:
            sides = tuple(side * self._stage.vae.stride for side in noised_BCHW.shape[-2:])
            if tuple(map_BCHW.shape[-2:]) != sides:
                raise ConfigError(
                    f"task.filter: made maps of {map_BCHW.shape[-2]} x {map_BCHW.shape[-1]} pixels of pictures of "
                    f"{sides[0]} x {sides[1]}; the control networks of {self._stage.name} take maps of the pictures' "
                    "size, of another filter"
                )
            inputs = self._stage.inputs(noised_BCHW, cond)
            maps_BCHW = repeated(map_BCHW, len(noised_BCHW))
            return self.module(noised_BCHW, timestep_B, control_BCHW=maps_BCHW, **inputs)

        return residuals

    def write(self, state: Mapping[str, Tensor], directory: Path) -> float:
        """Write a folder that `ControlNetModel.from_pretrained` of diffusers loads, see `Save`."""
        config = {name: value for name, value in self.module.config.items() if not name.startswith("_")}
        network = module_around(lambda: ControlNetModel.from_config(config), state)
        with replaced_directory(directory) as partial, quiet():
            network.save_config(partial)
            write_tensors(partial / FILE_NAME, state, {"format": "pt", FILTER: json.dumps(self.options.filter)})
            loaded = ControlNetModel.from_pretrained(partial, torch_dtype=network.dtype)
            check_equal_tensors(network.state_dict(), loaded.state_dict(), directory)
        return 0.0


def read_controlnet(
    source: str, config: Mapping[str, Any], *, key: str
) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    """Read a control network for a UNet of this diffusers config.

    `source` is a run, its export, a folder of diffusers, a single file of diffusers' names or the original's, or one of
    these on the hub. Returns the tensors under diffusers' names, and the configuration node of the maps' filter.
    """
    origin, layout = f"{key}={source}", original_layout(config, r".*zero_convs\.", "convert_controlnet_checkpoint")
    with open_weights(source, key=key, part=PART, layout=layout) as tensors:
        names = list(tensors.shapes())
        if FIRST_LAYER not in names:
            raise ConfigError(
                f"{origin}: holds no control network of Stable Diffusion, but {', '.join(names[:2]) or 'nothing'}; "
                "name a run of task=controlnet, or a folder or file of one"
            )
        state = {name: value.float().clone() for name, value in tensors.items()}
    file = find_weight_files(source, key=key, part=PART)[0]
    config_file = stored_mapping(file.parent / "config.json")
    for name, usual in UNSEEN.items():
        if config_file.get(name, usual) != usual:
            raise ConfigError(
                f"{origin}: has {name}={config_file[name]} in its config.json, and control networks have {usual} here; "
                "name another"
            )
    header: dict[str, str] = {}
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stored:
            header = stored.metadata() or {}
    with parsing(f"{origin}:"):
        return state, json.loads(header[FILTER]) if FILTER in header else None
