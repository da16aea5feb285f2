"""A distance between pictures by the features of a network that recognises objects: VGG-16, from a file of the user's.

Shape legend: B batch, C channels, H W size.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import copy_to, set_tensor
from cascade_train.models.formats.weights_keys import Stored
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.formats.weights_tensors import StoredTensors
from cascade_train.models.image_quality import check_installed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pictures that the network was trained on."""

LAYERS = (3, 8, 15, 22, 29)
"""The rectified layer in front of each pooling; these are compared."""


class FeatureDistance:
    """Mean squared difference of unit-length features: LPIPS (Zhang et al. 2018, eq. 1), or it with equal weights."""

    def __init__(
        self,
        weights: str,
        *,
        device: torch.device,
        linear: Sequence[Tensor] | None = None,
        key: str = "objective.perceptual.weights",
    ) -> None:
        """Load the frozen network in fp32.

        Args:
            weights: a file with torchvision's names, `features.0.weight` and so on; its classifier is not read.
            device: where it goes.
            linear: weight of each channel of each compared layer, (C,) each; None = 1, which LPIPS does not have.
            key: the config key that named the file.

        Raises:
            ConfigError: the file is not there, or of another network.
        """
        from torchvision.models.vgg import cfgs, make_layers

        with torch.device("meta"):
            features = make_layers(cfgs["D"])
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
        self._linear = None if linear is None else [each.to(device).view(1, -1, 1, 1) for each in linear]
        self._mean, self._std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))

    def __call__(self, image_BCHW: Tensor, original_BCHW: Tensor) -> Tensor:
        """Return the distance (B,) fp32 of images (B, 3, H, W) in [0, 1], of at least 16 pixels a side."""
        pairs = zip(self._layers(image_BCHW), self._layers(original_BCHW), strict=True)
        distances = [(a - b).square() for a, b in pairs]
        if self._linear is not None:
            distances = [each * weight for each, weight in zip(distances, self._linear, strict=True)]
        return torch.stack([each.sum(dim=1).mean(dim=(1, 2)) for each in distances]).sum(dim=0)

    def _layers(self, image_BCHW: Tensor) -> list[Tensor]:
        """Return features of unit length over the channels, (B, C, h, w) of each compared layer."""
        x, found = (image_BCHW.float() - self._mean) / self._std, []
        for number, layer in enumerate(list(self.features)[: LAYERS[-1] + 1]):
            x = layer(x) if not isinstance(layer, nn.ReLU) else torch.relu(x)  # torchvision's would write in place
            if number in LAYERS:
                found.append(nn.functional.normalize(x, dim=1, eps=1e-10))
        return found


def load_lpips(weights: str, *, device: torch.device, key: str) -> FeatureDistance:
    """Return LPIPS on VGG-16, version 0.1, whose trained weights of channels torchmetrics brings along.

    Args:
        weights: a file of VGG-16, see `FeatureDistance`.
        device: where it goes.
        key: the config key that named the file.

    Raises:
        ConfigError: torchmetrics is not installed, or the file is not there, or of another network.
    """
    check_installed()
    spec = find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise AssertionError("torchmetrics is installed")
    file = str(Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "vgg.pth")
    with StoredTensors(find_weight_files(file, key=key, part=None), key=key) as tensors:
        names = [f"lin{number}.model.1.weight" for number in range(len(LAYERS))]
        linear = [copy_to(tensors.read(Stored(name)), torch.float32, device).flatten() for name in names]
    return FeatureDistance(weights, device=device, linear=linear, key=key)
