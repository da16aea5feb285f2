"""Small denoising networks with published and other widths, filled so that every weight matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cascade_train.models.adapters.kinds import by_module
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export_lora import merged
from cascade_train.models.formats.lora_files import fill_adapters, module_shapes, read_lora
from cascade_train.models.lora import (
    LoraSpec,
    StoredLora,
    adapted_layers,
    adapter_state,
    attach_adapters,
    inject_lora,
    layer_parts,
    lora_spec,
)
from tests.unit.models.stages import network_inputs, tiny_network

SMALL: dict[str, Any] = tiny_network().arguments

SMALL_B: dict[str, Any] = SMALL | {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "clip_text_in_channels": None,
    "clip_image_in_channels": None,
    "effnet_in_channels": 16,
    "pixel_mapper_in_channels": 3,
    "timestep_conditioning_type": ["sca"],
    "switch_level": None,
}


def small_network(seed: int = 0, **changes: Any) -> CascadeUNet:
    """Return an eval network on the host whose every tensor is drawn from N(0, 0.1)."""
    network = empty_network(**changes).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def empty_network(**changes: Any) -> CascadeUNet:
    """Return the same network on the meta device."""
    with torch.device("meta"):
        return CascadeUNet(**(SMALL | changes)).eval()


def predict(network: torch.nn.Module, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the prediction of a small Stage C network on fixed inputs."""
    inputs = network_inputs(batch, side=3)
    cast = {name: value.to(dtype) for name, value in inputs.items() if name != "timestep_ratio"}
    return network(**inputs | cast, return_dict=False)[0]


def adapted(network: CascadeUNet | None = None, **changes: Any) -> CascadeUNet:
    """Return a network whose adapters are not zero, of rank 2 and alpha 3 on its attention unless changed."""
    network = small_network() if network is None else network
    options: dict[str, Any] = {"rank": 2, "alpha": 3.0, "dropout": 0.0, "module_filters": [".attn"], "seed": 0}
    inject_lora(network, **options | changes)
    generator = torch.Generator().manual_seed(0)
    for _, layer in adapted_layers(network):
        for parameter in layer_parts(layer).values():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return network.eval()


def stored(network: CascadeUNet, text: Mapping[str, Tensor] | None = None, **more: Any) -> StoredLora:
    """Return its adapters as files have them, and those of a text encoder."""
    of_text = {f"text_encoder.{name}": value for name, value in (text or {}).items()}
    return StoredLora(spec=lora_spec(network), state=adapter_state(network.state_dict()) | of_text, **more)


def load_lora(network: CascadeUNet, source: str) -> LoraSpec:
    """Put stored adapters onto a network that has none, and return what they are."""
    lora = read_lora(source, key="from", family=CASCADE, modules=module_shapes(network))
    attach_adapters(network, lora.spec)
    fill_adapters(network, lora.by_root()[""], f"from={source}")
    return lora.spec


def merge_into(network: CascadeUNet, lora: StoredLora) -> None:
    """Merge adapters into a network in place."""
    state = network.state_dict()
    for name in lora.spec.targets:
        weight = state[f"{name}.weight"]
        weight.copy_(merged(weight, name, [(lora, by_module(lora.state), 1.0)]))
