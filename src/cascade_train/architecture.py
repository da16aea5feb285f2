"""Which network stored weights or adapters belong to: told by a run's configuration, their tensors, or the user.

Used by the verbs that handle files without training; training composes its model itself.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from cascade_train.build import build_component
from cascade_train.config.groups import conf_dir, did_you_mean, group_options
from cascade_train.config.saved import CONFIG_NAME, load_saved_config
from cascade_train.errors import ConfigError
from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.export_formats import stored_size
from cascade_train.models.lora_files import adapter_size, holds_lora


def stored_network(source: str, *, model: str | None, key: str) -> nn.Module:
    """Return the network that `source` belongs to, on the meta device.

    Args:
        source: weights or adapters: a run, its export or a folder in it, another folder, a file, or a hub id.
        model: an option of the group `model`; None = the run's, else the published size that the tensors tell.
        key: the argument that named the source.

    Raises:
        ConfigError: nothing there, or tensors of no published size and no `model`.
    """
    folder = Path(source)
    if model is None:
        for candidate in (folder, folder.parent):
            if (candidate / CONFIG_NAME).is_file():
                return _architecture(build_component(load_saved_config(candidate), "model").network_config)
        model = adapter_size(source, key=key) if holds_lora(source) else stored_size(source, key=key)
    if model is None:
        options = ", ".join(group_options("model"))
        raise ConfigError(f"{key}={source}: its tensors are of no published size; name it by model=, one of {options}.")
    if model not in group_options("model"):
        raise ConfigError(f"model={model}: no such option.{did_you_mean(model, group_options('model'))}")
    return _architecture(instantiate(OmegaConf.load(conf_dir() / "model" / f"{model}.yaml").network, _convert_="all"))


def _architecture(config: CascadeUNetConfig) -> nn.Module:
    return config.build()


def show_log() -> None:
    """Show what the library logs as plain lines on stdout, as verbs do."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("cascade_train").setLevel(logging.INFO)
