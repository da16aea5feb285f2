"""Stable Diffusion under a control network: a copy of the UNet's way down that sees the map too (Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import check_fit, shapes_of
from cascade_train.models.initialize import ZEROS, DrawnValues, Fill, materialise, torch_rule
from cascade_train.models.stable_diffusion.formats.controlnet_folder import read_controlnet, save_controlnet
from cascade_train.models.stable_diffusion.networks.controlnet import ConditionControlNet, empty_controlnet
from cascade_train.models.stage import Conditions, Control, ControlOptions, Steering, repeated

if TYPE_CHECKING:
    from cascade_train.models.stable_diffusion.stage import StableDiffusion

OWN = "controlnet_"
"""Beginning of the names of what the UNet has not: features of the map, and the layers that begin at zero."""

OF_STAGE_C = {"blocks": None, "bottleneck": "effnet", "backbone_weights": None}
"""Options that mean nothing here, and the values that stand for that."""


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
        stored, origin = read_controlnet(source, dict(self._stage.network.config), key=key), f"{key}={source}"
        self._check_maps(stored.channels, stored.filter, origin)
        network = self._empty()
        check_fit(
            shapes_of(network.state_dict()),
            shapes_of(stored.state),
            origin,
            what="no control network of this model",
            remedy="choose the model= that it was trained on",
        )
        network.load_state_dict(stored.state, assign=True)
        self.module = nn.Module.to(network, device=self.device, dtype=torch.float32)

    def steer(self, control_BCHW: Tensor) -> Steering:
        """Return what the network makes of latents, noise level and conditions under maps (B, C, H, W)."""
        channels = self._channels()
        map_BCHW = control_BCHW.expand(-1, channels, -1, -1) if control_BCHW.shape[1] == 1 else control_BCHW

        def steering(noised_BCHW: Tensor, timestep_B: Tensor, cond: Conditions) -> dict[int, Tensor]:
            sides = tuple(side * self._stage.vae.stride for side in noised_BCHW.shape[-2:])
            if tuple(map_BCHW.shape[-2:]) != sides:
                raise ConfigError(
                    f"task.filter: made maps of {map_BCHW.shape[-2]} x {map_BCHW.shape[-1]} pixels of pictures of "
                    f"{sides[0]} x {sides[1]}; the control networks of {self._stage.name} take maps of the pictures' "
                    "size, of another filter"
                )
            inputs = self._stage.inputs(noised_BCHW, cond)
            found: dict[int, Tensor] = self.module(
                noised_BCHW, timestep_B, control_BCHW=repeated(map_BCHW, len(noised_BCHW)), **inputs
            )
            return found

        return steering

    def write(self, state: Mapping[str, Tensor], directory: Path) -> float:
        """Write a folder that `ControlNetModel.from_pretrained` of diffusers loads."""
        return save_controlnet(self.module.config, state, self.options.filter, directory)


def check_options(options: ControlOptions, family: str) -> None:
    """Refuse options that are for Stage C; a ConfigError."""
    for key, unset in OF_STAGE_C.items():
        if (value := getattr(options, key)) != unset:
            raise ConfigError(
                f"task.{key}={value}: is for control networks of Stage C; those of {family} are copies of the "
                f"network's way down. Set it to {'null' if unset is None else unset}."
            )
