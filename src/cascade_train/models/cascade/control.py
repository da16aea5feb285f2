"""Stage C under a control network: features of the map alone, added in front of some residual blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.formats.controlnet_file import StoredControl, read_control, save_control
from cascade_train.models.cascade.formats.names import recognise_size
from cascade_train.models.cascade.networks.controlnet import (
    ControlNetwork,
    ControlSpec,
    block_widths,
    build_control_network,
    mirrored_blocks,
)
from cascade_train.models.cascade.networks.efficientnet import load_features
from cascade_train.models.stage import Conditions, Control, ControlOptions, Steering, repeated

if TYPE_CHECKING:
    from cascade_train.models.cascade.networks.unet import CascadeUNet


class FeatureControl(Control):
    """A `ControlNetwork` beside a `CascadeUNet`. What it adds depends neither on the latents nor on the noise level."""

    module: ControlNetwork

    def __init__(self, network: CascadeUNet, options: ControlOptions, device: torch.device) -> None:
        self._widths = block_widths(network.config)
        self._base_size = recognise_size({name: tuple(p.shape) for name, p in network.named_parameters()})
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
        with torch.device("meta"):
            network = ControlNetwork(spec)
        network.load_state_dict(stored.state, assign=True)
        self.module = network.float().to(self.device)

    def steer(self, control_BCHW: Tensor) -> Steering:
        """Return the features of maps (B, C, h, w), made once."""
        features = cast("dict[int, Tensor]", self.module(control_BCHW))

        def steering(noised_BCHW: Tensor, _timestep_B: Tensor, _cond: Conditions) -> dict[int, Tensor]:
            return {block: repeated(value, len(noised_BCHW)) for block, value in features.items()}

        return steering

    def write(self, state: Mapping[str, Tensor], directory: Path) -> float:
        """Write a folder with one file in the original's layout and our metadata."""
        spec, made_by = self.module.spec, self.options.filter
        return save_control(StoredControl(spec=spec, state=state, base_size=self._base_size, filter=made_by), directory)


def _check_blocks(blocks: Sequence[int], executed: int, origin: str) -> None:
    unknown = [block for block in blocks if not 0 <= block < executed]
    if unknown:
        raise ConfigError(
            f"{origin}: this model executes {executed} residual blocks, 0 to {executed - 1}, and {unknown[0]} is none "
            "of them; name others, or choose a deeper model"
        )
