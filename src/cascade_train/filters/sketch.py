"""Edges as people draw them, in lines of random width: sketches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cascade_train.batch import SampleTransform
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, between, resized
from cascade_train.filters.parts.edge_network import SMALLEST_SIDE, EdgeNetwork
from cascade_train.filters.parts.files import WeightsFile, find_file, load_weights
from cascade_train.filters.parts.morphology import check_kernels, dilated
from cascade_train.options import File

EDGES = WeightsFile(
    key="task.filter.weights",
    what="the edge network of the sketch filter",
    usual_name="table5_pidinet.pth",
    licence="research alone, commercial use by consent of PiDiNet's authors",
    found="github.com/hellozhuo/pidinet and github.com/Stability-AI/StableCascade, modules/cnet_modules/pidinet/ckpts",
)


class SketchFilter(ControlFilter):
    """One channel: edges by PiDiNet, thickened and made black and white at random.

    Stable Cascade, modules/controlnet.py, `PidiFilter`; there all pictures of a batch share their draws.

    Args:
        weights: of the network, a local file or `owner/name:file` on the hub.
        resize: side in pixels of the square copy in which edges are searched; null = the picture itself.
        dilation_kernels: diameters in pixels, by one of which each sample's lines are thickened; 0 = not at all.
        binarize: 1 where an edge is surer than a threshold, else 0; false = how sure each edge is.
        threshold: drawn between these two for each sample.

    Raises:
        ValueError: a number out of range.
    """

    channels = 1

    def __init__(
        self,
        *,
        weights: File[str],
        resize: int | None,
        dilation_kernels: list[int],
        binarize: bool,
        threshold: list[float],
    ) -> None:
        if resize is not None and resize < SMALLEST_SIDE:
            raise ValueError(f"resize={resize}: edges are sketched in a copy of at least {SMALLEST_SIDE} px")
        check_kernels("dilation_kernels", dilation_kernels)
        if len(threshold) != 2 or not 0.0 <= threshold[0] <= threshold[1] <= 1.0:
            raise ValueError(f"threshold={threshold}: is drawn for each sketch, give [low, high] with 0 <= low <= high")
        self.weights = weights
        self.resize = resize
        self.dilation_kernels = dilation_kernels
        self.binarize = binarize
        self.threshold = threshold
        self.deterministic = len(set(dilation_kernels)) == 1 and (not binarize or threshold[0] == threshold[1])

    def sample_transform(self) -> SampleTransform:
        """Return what draws width of line and threshold.

        Raises:
            ConfigError: the network's weights are not there, with their licence and where they are usually found.
        """
        find_file(self.weights, EDGES)
        return self._draw

    def _draw(self, image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        place = int(between(0, len(self.dilation_kernels), generator))
        low, high = self.threshold
        return {
            "control_kernel": np.array(place, dtype=np.int64),
            "control_threshold": np.full((1, 1, 1), between(low, high, generator), dtype=np.float32),
        }

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Load the network.

        Raises:
            ConfigError: its weights are not there, with their licence and where they are usually found.
        """
        network = EdgeNetwork().eval().requires_grad_(False)
        load_weights(network, self.weights, EDGES, device=device)

        @torch.no_grad()
        def sketched(image_BCHW: Tensor, made: Mapping[str, Tensor]) -> Tensor:
            size = image_BCHW.shape[-2:]
            if self.resize is None and min(size) < SMALLEST_SIDE:
                raise ConfigError(
                    f"task.filter.resize=null: pictures of {tuple(size)} px are too small to find edges in, they need"
                    f" sides of {SMALLEST_SIDE} px; give task.filter.resize"
                )
            edges_B1HW = network(resized(image_BCHW, size if self.resize is None else (self.resize, self.resize)))
            thick = torch.stack([dilated(edges_B1HW, kernel) for kernel in self.dilation_kernels])
            chosen_B1HW = thick[made["control_kernel"], torch.arange(len(image_BCHW), device=image_BCHW.device)]
            if self.binarize:
                chosen_B1HW = (chosen_B1HW > made["control_threshold"]).float()
            return resized(chosen_B1HW, size)

        return sketched
