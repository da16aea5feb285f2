"""EfficientNet-V2-S as torchvision lays it out, without its classifier: features at a 32nd of the size, 1280 channels.

Shape legend: B batch, C channels, H W image size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import check_fit, open_weights, shapes_of

IMAGENET = "imagenet"
"""In the place of a path: torchvision's own values, trained on ImageNet, which it downloads."""

STEM = "0.0.weight"
"""The first convolution, (24, C, 3, 3)."""

_PREFIXES = ("features.", "backbone.", "")
"""In front of the features' names: of torchvision, of the original's compressor and ControlNets, and of neither."""


class FixedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm by its stored statistics in any mode, so that a sample never depends on its neighbours.

    Scale and shift train. Computes in fp32 whatever the dtype of its parameters and input, which it returns.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise (B, C, H, W)."""
        scale_C, shift_C = self.weight.float(), self.bias.float()
        mean_C, variance_C = self.running_mean.float(), self.running_var.float()
        return nn.functional.batch_norm(x_BCHW, mean_C, variance_C, scale_C, shift_C, eps=self.eps)


def _models() -> Any:
    from torchvision import models  # seconds to import, and few runs need it

    return models


def build_features() -> nn.Sequential:
    """Return the features of EfficientNet-V2-S for (B, 3, H, W), without download, on torch's current device.

    Their batch statistics are fixed. A weight may have another dtype than those, as in training in bf16.
    """
    features: nn.Sequential = _models().efficientnet_v2_s(weights=None).features
    for name, module in list(features.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            features.set_submodule(name, FixedBatchNorm2d(module.num_features, eps=module.eps))
    return features


def build_control_features(channels: int) -> nn.Sequential:
    """Return the features for images of any number of channels.

    Where that is not 3, the first convolution has no padding, so that maps need 3 x 3 pixels at least (Stable Cascade,
    modules/controlnet.py).
    """
    features = build_features()
    if channels != 3:
        features[0][0] = nn.Conv2d(channels, 24, kernel_size=3, stride=2, bias=False)
    return features


def load_features(features: nn.Module, source: str, *, key: str) -> None:
    """Give features from `build_control_features`, which have memory, their trained values, in place.

    Of more or fewer channels than 3, the first three are red, green and blue as far as there are as many, and the
    others begin at zero. `source` is "imagenet", or a file of torchvision, of the compressor or of bare features, else
    a ConfigError that names `key`.
    """
    found = {name: value.float() for name, value in _read(source, key).items()}
    wanted = features.state_dict()
    if STEM in found:
        stem = torch.zeros_like(wanted[STEM], device="cpu")
        kept = min(stem.shape[1], found[STEM].shape[1])
        stem[:, :kept] = found[STEM][:, :kept]
        found[STEM] = stem
    what, remedy = "not the weights of EfficientNet-V2-S", "name those of EfficientNet-V2-S, or null"
    check_fit(shapes_of(wanted), shapes_of(found), f"{key}={source}", what=what, remedy=remedy)
    features.load_state_dict(found)


def _read(source: str, key: str) -> dict[str, Tensor]:
    """Return the features' tensors by their own names."""
    if source == IMAGENET:
        found = _download(key)
    else:
        with open_weights(source, key=key) as tensors:
            found = {name: value.clone() for name, value in tensors.items()}
    prefix = next(prefix for prefix in _PREFIXES if f"{prefix}{STEM}" in found or not prefix)
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def _download(key: str) -> Mapping[str, Tensor]:
    try:
        return _models().EfficientNet_V2_S_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    except (URLError, OSError) as error:
        raise ConfigError(
            f"{key}={IMAGENET}: torchvision cannot download its weights ({error}); name a file that you copied here, "
            "or null for values from a seed"
        ) from error
