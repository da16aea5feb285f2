"""The contract of a control network beside a stage's network.

Shape legend: B batch, C channels, H W latent size, h w size of a control map.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError

log = logging.getLogger(__name__)

Conditions = dict[str, Tensor]
"""Keyword arguments of the network beside the noised latent and the timestep ratio."""

ControlResiduals = Callable[[Tensor, Tensor, Conditions], dict[int, Tensor]]
"""Maps noised latents (B, C, H, W), timestep ratios (B,) and conditions to what is added in the network, by block.

The latents may be several copies of the batch, one after the other.
"""

Bottleneck = Literal["effnet", "simple", "large", "small"]
"""Networks that make features of a control map."""


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Options of a control network; all but the first two are keys of `task`.

    Attributes:
        channels: of the maps.
        filter: configuration node of the filter that makes them.
        weights: a control network to start from; None = a new one.
        blocks: the controlled blocks; None = those of `weights`, or the family's own.
        bottleneck: makes features of a map.
        backbone_weights: initial values of the bottleneck.
        seed: of a new control network's values.
    """

    channels: int
    filter: Mapping[str, Any]
    weights: str | None
    blocks: list[int] | None
    bottleneck: str
    backbone_weights: str | None
    seed: int


class Control(abc.ABC):
    """A control network, made or read by the constructor; a ConfigError if it does not fit.

    Attributes:
        module: the network, fp32 on the device; `load` replaces it.
    """

    module: Any

    def __init__(self, options: ControlOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        if options.weights is None:
            self.module = self._new()
        else:
            self.load(options.weights, key="task.weights")

    @abc.abstractmethod
    def _new(self) -> nn.Module:
        """Return a network with its first values, without effect yet."""

    @abc.abstractmethod
    def load(self, source: str, *, key: str) -> None:
        """Load another network from a run, its export or a file, named by `key`; a ConfigError if it does not fit."""

    @abc.abstractmethod
    def residuals(self, control_BCHW: Tensor) -> ControlResiduals:
        """Return what maps (B, C, h, w) fp32 add in the stage's network."""

    @abc.abstractmethod
    def write(self, state: Mapping[str, Tensor], directory: Path) -> float:
        """Write a whole state dict of `module`, see `Save`."""

    def units(self) -> list[list[nn.Module]]:
        """Return the modules that shard and compile together."""
        return self.module.units()

    def _check_maps(self, channels: int, made_by: Mapping[str, Any] | None, origin: str) -> None:
        """Refuse maps of other channels than a stored network takes; warn where another filter made them."""
        ours = self.options.filter
        if channels != self._channels():
            by = f", which {made_by['_target_']} made" if made_by else ""
            raise ConfigError(
                f"{origin}: this control network takes maps of {channels} channels{by}, task.filter makes "
                f"{self._channels()}; choose its filter, filter@task.filter="
            )
        if made_by is None:
            log.warning("%s: does not say what made its maps, and is now given %s", origin, ours)
        elif made_by != ours:
            log.warning("%s: was trained on maps of %s, and is now given %s", origin, made_by, ours)

    def _channels(self) -> int:
        """Return the channels of the maps as the network takes them."""
        return self.options.channels


def repeated(map_BCHW: Tensor, count: int) -> Tensor:
    """Return maps (B, C, h, w) for `count` latents: as many copies of the batch, one after the other."""
    copies = count // len(map_BCHW)
    return map_BCHW if copies == 1 else map_BCHW.repeat(copies, 1, 1, 1)
