"""Maps by any network that is stored as ONNX: depth, poses, edges, segments. Runs in the data workers."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlMap, Encode, ImageFilter, restored
from cascade_train.filters.parts.requirements import WeightsFile, find_file, open_session, require
from cascade_train.filters.torch_network import check_options, network_input, network_map
from cascade_train.options import File

NETWORK = WeightsFile(
    key="task.filter.weights",
    what="the network of this filter, which you choose",
    usual_name="model.onnx",
    licence="its own; Depth Anything V2 Small has Apache-2.0, HigherHRNet MIT",
    found="the network's own pages, or made from its code by torch.onnx.export",
)


class OnnxFilter(ImageFilter):
    """The output of a network that sees a copy of the picture, at the picture's size.

    Each data worker runs it on one thread of its own.

    Args:
        weights: the network, a local `.onnx` file or `owner/name:file` on the hub. It takes one input,
            (1, 3, height, width) fp32.
        channels: of the map; where the network has more, the first.
        resize: side in pixels of the square copy that the network sees; null = the picture itself.
        mean: of red, green and blue in [0, 1], taken away before the network.
        std: by which they are divided then.
        output: name of the network's output that is the map; null = the first.
        scaling: picture = each map is brought to [0, 1] by its own range; none = the network's numbers.

    Raises:
        ValueError: a number out of range.
        ConfigError: onnxruntime is not installed.
    """

    def __init__(
        self,
        *,
        weights: File[str],
        channels: int,
        resize: int | None,
        mean: list[float],
        std: list[float],
        output: str | None,
        scaling: Literal["picture", "none"],
    ) -> None:
        require("onnxruntime")
        check_options(channels=channels, resize=resize, mean=mean, std=std)
        self.weights = weights
        self.channels = channels
        self.resize = resize
        self.mean = mean
        self.std = std
        self.output = output
        self.scaling = scaling

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
        return super().sample_transform()

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return the map of one picture, (C, h, w) float32, of the size that the network gives."""
        session = open_session(find_file(self.weights, NETWORK), NETWORK)
        image_BCHW = torch.from_numpy(image)[None].float() / 255
        seen = network_input(image_BCHW, resize=self.resize, mean=self.mean, std=self.std)
        wanted = [self.output or session.get_outputs()[0].name]
        [found] = session.run(wanted, {session.get_inputs()[0].name: seen.numpy()})
        made = network_map(torch.from_numpy(found), channels=self.channels, scaling=self.scaling)
        return made[0].numpy()

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Return the map at the size of the pictures."""
        return restored
