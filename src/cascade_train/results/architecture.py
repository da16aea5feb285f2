"""Which network stored weights or adapters belong to: told by a run's configuration, their tensors, or the user.

Used by the verbs that handle files without training; training composes its model itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from cascade_train.assembly.components import build_component
from cascade_train.config.groups import conf_dir, did_you_mean, group_options
from cascade_train.config.hydra_compat import construct
from cascade_train.config.saved import CONFIG_NAME, load_saved_config
from cascade_train.errors import ConfigError
from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.formats.export import network_config
from cascade_train.models.formats.lora_files import adapter_size, holds_lora
from cascade_train.models.formats.weights import stored_size
from cascade_train.models.formats.weights_source import NETWORK_PARTS

PARTS = ("lora", *NETWORK_PARTS, "export")
"""Names of a run's folders between its configuration and its files."""


def stored_network(source: str, *, model: str | None, key: str, allow_any_target: bool = False) -> nn.Module:
    """Return the network that `source` belongs to, on the meta device.

    Args:
        source: weights or adapters: a run, its export or a folder in it, another folder, a file, or a hub id.
        model: an option of the group `model`; None = the run's, else the published size that the tensors tell.
        key: the argument that named the source.
        allow_any_target: build classes of any package that a run's configuration names.

    Raises:
        ConfigError: nothing there, or tensors of no published size and no `model`.
    """
    run = run_of(Path(source))
    if model is None and run is not None:
        cfg = load_saved_config(run, allow_any_target=allow_any_target)
        stage = build_component(cfg, "model")
        if not isinstance(stage, DenoisingStage) or not build_component(cfg, "objective").denoises:
            raise ConfigError(
                f"{key}={source}: a run of what makes pictures of {stage.name}'s latents, whose export/ holds every "
                "format that there is of it."
            )
        return _architecture(stage.network_config)
    if model is None:
        model = adapter_size(source, key=key) if holds_lora(source) else stored_size(source, key=key)
    networks = _networks()
    if model is None:
        options = ", ".join(networks)
        raise ConfigError(f"{key}={source}: its tensors are of no published size; name it by model=, one of {options}.")
    if model not in networks:
        raise ConfigError(f"model={model}: no such option.{did_you_mean(model, networks)}")
    return _architecture(construct(networks[model]))


def _networks() -> dict[str, Any]:
    """Return the nodes of the networks that models name themselves: not of autoencoders, nor of variants of a model."""
    files = {name: OmegaConf.load(conf_dir() / "model" / f"{name}.yaml") for name in group_options("model")}
    nodes = {name: OmegaConf.select(file, "network") for name, file in files.items()}
    return {name: node for name, node in nodes.items() if node is not None}


def run_of(path: Path) -> Path | None:
    """Return the folder that holds the configuration of the run that left `path`; None = no run did."""
    folder = path.parent if path.is_file() else path
    while not (folder / CONFIG_NAME).is_file():
        if folder.name not in PARTS:
            return None
        folder = folder.parent
    return folder


def _architecture(config: CascadeUNetConfig) -> nn.Module:
    return config.build()


def part_name(network: nn.Module) -> str:
    """Return what the folder of a network is called in pipelines and exports: "prior" (Stage C) or "decoder"."""
    prior, decoder = NETWORK_PARTS
    return decoder if network_config(network)["clip_text_in_channels"] is None else prior
