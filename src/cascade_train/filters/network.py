"""Maps by any network: depth, poses, edges, segments.

A network of torch runs on the device, on whole batches; one stored as ONNX in the data workers, picture by picture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, map_at_picture_size, resize_map
from cascade_train.filters.parts.requirements import WeightsFile, find_file, load_weights, open_session, require
from cascade_train.options import File, Positive, check_fields

NETWORK = WeightsFile(
    key="task.filter.weights",
    what="the weights of this filter's network, which you choose",
    usual_name="model.safetensors",
    licence="its own",
    found="the network's own pages",
)
ONNX_NETWORK = WeightsFile(
    key="task.filter.weights",
    what="the network of this filter, which you choose",
    usual_name="model.onnx",
    licence="its own; Depth Anything V2 Small has Apache-2.0, HigherHRNet MIT",
    found="the network's own pages, or made from its code by torch.onnx.export",
)


@dataclass(kw_only=True, eq=False)
class NetworkMap(ControlFilter):
    """The output of a network that sees a copy of the picture, at the picture's size."""

    channels: Positive[int]
    resize: Positive[int | None]
    mean: list[float]  # of red, green and blue in [0, 1], subtracted before the network
    std: list[float]  # by which they are divided then
    output: str | None
    scaling: Literal["picture", "none"]

    def __post_init__(self) -> None:
        check_fields(self, "task.filter.")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean={self.mean}, std={self.std}: give three numbers each, for RGB, std above 0")

    def network_input(self, image_BCHW: Tensor) -> Tensor:
        """Resize and normalise pictures (B, 3, H, W) float in [0, 1] for the network."""
        if self.resize is not None:
            image_BCHW = F.interpolate(image_BCHW, size=(self.resize, self.resize), mode="bilinear", antialias=True)
        mean, std = (image_BCHW.new_tensor(value).view(1, 3, 1, 1) for value in (self.mean, self.std))
        return (image_BCHW - mean) / std

    def network_map(self, output: Tensor) -> Tensor:
        """Maps (B, channels, h, w) fp32 of an output, (B, C, h, w) or (B, h, w); else a ConfigError."""
        map_BCHW = output.float()[:, None] if output.dim() == 3 else output.float()
        if map_BCHW.dim() != 4 or map_BCHW.shape[1] < self.channels:
            raise ConfigError(
                f"task.filter: the network's output has shape {tuple(output.shape)}, which holds no maps of"
                f" {self.channels} channels, (batch, channels, height, width); choose another task.filter.output or"
                " task.filter.channels"
            )
        map_BCHW = map_BCHW[:, : self.channels]
        if self.scaling == "none":
            return map_BCHW
        low, high = map_BCHW.amin(dim=(1, 2, 3), keepdim=True), map_BCHW.amax(dim=(1, 2, 3), keepdim=True)
        return (map_BCHW - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(kw_only=True, eq=False)
class NetworkFilter(NetworkMap):
    """The map of any network of torch: a class of yours, or `load_exported` with a `path`."""

    network: Callable[[], nn.Module]
    weights: File[str | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.network, partial):
            raise ValueError("network: is made at once; give it `_partial_: true`, so that it is made on the device")

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Make the network, frozen and in fp32."""
        network = self.network().float().requires_grad_(False)
        if self.weights is not None:
            load_weights(network, self.weights, NETWORK, device=device)
        network = network.to(device)
        for part in network.modules():  # evaluation mode; exported programs refuse the method of that name
            part.training = False

        @torch.no_grad()
        def by_network(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
            output = self._chosen(network(self.network_input(image_BCHW)))
            return resize_map(self.network_map(output), image_BCHW.shape[-2:])

        return by_network

    def _chosen(self, returned: Any) -> Tensor:
        if self.output is not None:
            is_mapping = isinstance(returned, Mapping)
            returned = returned.get(self.output) if is_mapping else getattr(returned, self.output, None)
        if not isinstance(returned, Tensor):
            raise ConfigError(
                f"task.filter.output={self.output}: names no tensor in what the network returns,"
                f" {type(returned).__name__}; name its key or attribute, or null where the network returns the map"
            )
        return returned

    def node(self) -> dict[str, Any]:
        """Filter as a configuration node, the network as one of its own."""
        make: Any = self.network
        target = {"_target_": f"{make.func.__module__}.{make.func.__qualname__}", "_partial_": True}
        return {**super().node(), "network": {**target, **make.keywords}}


def load_exported(*, path: str) -> nn.Module:
    """Read a network that `torch.export.save` wrote to a local `.pt2` file, or `owner/name:file` on the hub.

    A ConfigError where it is not there, or is no such network.
    """
    known = replace(NETWORK, key="task.filter.network.path", usual_name="model.pt2")
    file = find_file(path, known)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch 2.11 reads weights from memory that it must not write
            return torch.export.load(file).module()
    except Exception as error:  # zip, json and pickle each have their own
        fault = f"torch.export cannot read this file ({type(error).__name__}); write it by torch.export.save"
        raise ConfigError(f"{known.key}={path}: {fault}") from error


@dataclass(kw_only=True, eq=False)
class OnnxFilter(NetworkMap):
    """The map of a network stored as ONNX that takes one input, (1, 3, height, width) fp32. Needs onnxruntime.

    Each data worker runs it on one thread of its own.
    """

    weights: File[str]

    def __post_init__(self) -> None:
        require("onnxruntime")
        super().__post_init__()

    def sample_transform(self) -> SampleTransform:
        """Runs the network in the workers; it is opened and checked now."""
        session = open_session(self.weights, ONNX_NETWORK)
        inputs, outputs = session.get_inputs(), [output.name for output in session.get_outputs()]
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            takes = ", ".join(f"{node.name} {node.type}" for node in inputs)
            rule = "it must take one fp32 input, a picture (1, 3, height, width)"
            raise ConfigError(f"task.filter.weights={self.weights}: takes {takes}; {rule}")
        fixed = [side for side in inputs[0].shape[2:] if isinstance(side, int)]
        if any(side != self.resize for side in fixed):
            raise ConfigError(f"task.filter.resize={self.resize}: this network takes {fixed} px alone; set it to that")
        if self.output is not None and self.output not in outputs:
            raise ConfigError(f"task.filter.output={self.output}: the network's outputs are {', '.join(outputs)}")
        return self._make

    def _make(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        session = open_session(self.weights, ONNX_NETWORK)
        seen = self.network_input(torch.from_numpy(image)[None].float() / 255)
        wanted = [self.output or session.get_outputs()[0].name]
        [output] = session.run(wanted, {session.get_inputs()[0].name: seen.numpy()})
        return {"control_map": self.network_map(torch.from_numpy(output))[0].numpy()}

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Map at the size of the pictures."""
        return map_at_picture_size
