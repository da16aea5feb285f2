"""A distance between pictures by the features of a network that recognises objects: VGG-16, from a file of the user's.

Shape legend: B batch, C channels, H W size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.weights import copy_to, set_tensor
from cascade_train.models.weights_keys import Stored
from cascade_train.models.weights_source import find_weight_files
from cascade_train.models.weights_tensors import StoredTensors

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pictures that the network was trained on."""

LAYERS = (3, 8, 15, 22, 29)
"""The rectified layer in front of each pooling; these are compared."""


class FeatureDistance:
    """Mean squared difference of unit-length features, as LPIPS (Zhang et al. 2018, eq. 1) with equal weights."""

    def __init__(self, weights: str, *, device: torch.device) -> None:
        """Load the frozen network in fp32.

        Args:
            weights: a file with torchvision's names, `features.0.weight` and so on; its classifier is not read.
            device: where it goes.

        Raises:
            ConfigError: the file is not there, or of another network.
        """
        from torchvision.models.vgg import cfgs, make_layers

        with torch.device("meta"):
            features = make_layers(cfgs["D"])
        key = "objective.perceptual.weights"
        with StoredTensors(find_weight_files(weights, key=key, part=None), key=key) as tensors:
            shapes = tensors.shapes()
            for name, value in features.state_dict().items():
                if shapes.get(f"features.{name}") != tuple(value.shape):
                    raise ConfigError(
                        f"{key}={weights}: features.{name} of VGG-16 is not there, or of another shape; give "
                        "torchvision's vgg16-397923af.pth, or null"
                    )
                set_tensor(features, name, copy_to(tensors.read(Stored(f"features.{name}")), torch.float32, device))
        self.features: nn.Sequential = features.eval().requires_grad_(requires_grad=False)
        self._mean, self._std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))

    def __call__(self, image_BCHW: Tensor, original_BCHW: Tensor) -> Tensor:
        """Return the distance (B,) fp32 of images (B, 3, H, W) in [0, 1], of at least 16 pixels a side."""
        pairs = zip(self._layers(image_BCHW), self._layers(original_BCHW), strict=True)
        return torch.stack([(a - b).square().sum(dim=1).mean(dim=(1, 2)) for a, b in pairs]).sum(dim=0)

    def _layers(self, image_BCHW: Tensor) -> list[Tensor]:
        """Return features of unit length over the channels, (B, C, h, w) of each compared layer."""
        x, found = (image_BCHW.float() - self._mean) / self._std, []
        for number, layer in enumerate(list(self.features)[: LAYERS[-1] + 1]):
            x = layer(x) if not isinstance(layer, nn.ReLU) else torch.relu(x)  # torchvision's would write in place
            if number in LAYERS:
                found.append(nn.functional.normalize(x, dim=1, eps=1e-10))
        return found
