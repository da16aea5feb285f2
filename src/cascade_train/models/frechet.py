"""How far apart two sets of pictures are: the Fréchet distance of what a network sees in them.

Must not live here: sums over batches and ranks (engine/set_distance.py).

Shape legend: B batch, H W image size, D features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from cascade_train.errors import ConfigError, install_hint
from cascade_train.models.formats.weights_keys import Stored
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.formats.weights_tensors import StoredTensors

LAYER = "2048"
"""The last pooling of Inception V3, whose 2048 features FID compares."""


def load_inception(weights: str, *, device: torch.device, key: str) -> Callable[[Tensor], Tensor]:
    """Return the features of FID's Inception V3: (B, 3, H, W) float, counted within [0, 1], to (B, 2048) fp32.

    Pictures are rounded to bytes and brought to 299 x 299 as in the first implementation (Heusel et al. 2017).

    Args:
        weights: a file with torch-fidelity's names, which are pytorch-fid's.
        device: where it goes.
        key: the config key that named the file.

    Raises:
        ConfigError: torch-fidelity is not installed, or the file is not there, or of another network.
    """
    if find_spec("torch_fidelity") is None:
        raise ConfigError(
            f"{key} is measured by the library torch-fidelity, which is not installed. {install_hint('metrics')}."
        )
    from torch_fidelity import FeatureExtractorInceptionV3

    with StoredTensors(find_weight_files(weights, key=key, part=None), key=key) as tensors:
        state = {name: tensors.read(Stored(name)) for name in tensors.shapes()}
    with tempfile.TemporaryDirectory() as folder:  # the library unpickles whatever it is given: a copy is harmless
        torch.save(state, Path(folder) / "inception.pth")
        try:
            module = FeatureExtractorInceptionV3("fid", [LAYER], str(Path(folder) / "inception.pth"))
        except RuntimeError as error:
            raise ConfigError(
                f"{key}={weights}: is not FID's Inception V3; give torch-fidelity's "
                "weights-inception-2015-12-05-6726825d.pth, or null"
            ) from error
    module.to(device)

    @torch.no_grad()
    def features(image_BCHW: Tensor) -> Tensor:
        pixels_BCHW = (image_BCHW.float().clamp(0, 1) * 255).round().to(torch.uint8)
        features_BD: Tensor = module(pixels_BCHW)[0]
        return features_BD

    return features


def frechet_distance(
    mean_D: Tensor, covariance_DD: Tensor, other_mean_D: Tensor, other_covariance_DD: Tensor
) -> Tensor:
    """Return the squared Fréchet distance of two normal distributions, () of their dtype (Heusel et al. 2017, eq. 6).

    The trace of the root of the covariances' product is that of a symmetric matrix with the same eigenvalues.
    """
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    root_DD = (vectors_DD * values_D.clamp(min=0).sqrt()) @ vectors_DD.T
    mixed_D = torch.linalg.eigvalsh(root_DD @ other_covariance_DD @ root_DD)
    spread = covariance_DD.trace() + other_covariance_DD.trace() - 2 * mixed_D.clamp(min=0).sqrt().sum()
    return (mean_D - other_mean_D).square().sum() + spread
