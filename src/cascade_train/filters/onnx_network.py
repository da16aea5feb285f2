"""Maps by any network that is stored as ONNX: depth, poses, edges, segments. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlMap, Encode, restored
from cascade_train.filters.parts.requirements import WeightsFile, find_file, open_session, require
from cascade_train.filters.torch_network import NetworkMap
from cascade_train.options import File

NETWORK = WeightsFile(
    key="task.filter.weights",
    what="the network of this filter, which you choose",
    usual_name="model.onnx",
    licence="its own; Depth Anything V2 Small has Apache-2.0, HigherHRNet MIT",
    found="the network's own pages, or made from its code by torch.onnx.export",
)


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
        """Return the workers' half, once the network was read and found to fit."""
        session = open_session(find_file(self.weights, NETWORK), NETWORK)
        inputs, outputs = session.get_inputs(), [each.name for each in session.get_outputs()]
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            takes = ", ".join(f"{each.name} {each.type}" for each in inputs)
            raise ConfigError(
                f"task.filter.weights={self.weights}: takes {takes}; it must take one fp32 input, a picture"
                " (1, 3, height, width)"
            )
        fixed = [side for side in inputs[0].shape[2:] if isinstance(side, int)]
        if any(side != self.resize for side in fixed):
            raise ConfigError(
                f"task.filter.resize={self.resize}: this network takes pictures of {fixed} px alone; set resize to that"
            )
        if self.output is not None and self.output not in outputs:
            raise ConfigError(f"task.filter.output={self.output}: the network's outputs are {', '.join(outputs)}")
        return self._make

    def _make(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        session = open_session(find_file(self.weights, NETWORK), NETWORK)
        seen = self.network_input(torch.from_numpy(image)[None].float() / 255)
        wanted = [self.output or session.get_outputs()[0].name]
        [found] = session.run(wanted, {session.get_inputs()[0].name: seen.numpy()})
        return {"control_map": self.network_map(torch.from_numpy(found))[0].numpy()}

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Return the map at the size of the pictures."""
        return restored
