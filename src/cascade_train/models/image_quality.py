"""Measures of images: against their originals (PSNR, SSIM, LPIPS), their captions (CLIPScore), and other sets (FID).

Must not live here: sums over batches and ranks (engine/).

Shape legend: B batch, C channels, H W image size, D features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from cascade_train.errors import ConfigError, install_hint
from cascade_train.models.formats.weights import check_dtypes, check_fit, copy_to, read_belonging, shapes_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the images on which VGG-16 was trained."""

LAYERS = (3, 8, 15, 22, 29)
"""The compared layers of VGG-16: the rectified one before each pooling."""

VGG, INCEPTION = "torchvision's vgg16-397923af.pth", "torch-fidelity's weights-inception-2015-12-05-6726825d.pth"
"""The files that LPIPS and FID are measured with."""


def check_installed() -> None:
    """Raise a `ConfigError` where the library of metrics is not installed."""
    if find_spec("torchmetrics") is None:
        raise ConfigError(
            "Reconstructions are measured by the library torchmetrics, which is not installed. "
            f"{install_hint('metrics')}."
        )


def image_quality(image_BCHW: Tensor, original_BCHW: Tensor) -> dict[str, Tensor]:
    """Return `psnr` in decibels and `ssim` (Wang et al. 2004) of each image, (B,) fp32; higher is better.

    Images (B, 3, H, W) float are clamped to [0, 1]; originals lie in it.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    image_BCHW = image_BCHW.float().clamp(0, 1)
    ssim_B = structural_similarity_index_measure(image_BCHW, original_BCHW, data_range=1.0, reduction="none")
    return {"psnr": psnr(image_BCHW, original_BCHW), "ssim": ssim_B.reshape(len(image_BCHW))}


def psnr(image_BCHW: Tensor, original_BCHW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in decibels of images in [0, 1], (B,) fp32; 100 at most."""
    error_B = (image_BCHW - original_BCHW).square().mean(dim=(1, 2, 3))
    return -10.0 * error_B.clamp(min=1e-10).log10()


@dataclass(frozen=True, kw_only=True)
class ReconstructionQuality:
    """Measures of decoded images against their originals.

    `multiple` is the side in pixels of one semantic latent's square; None = only `lpips` is measured, if it is there.
    """

    multiple: int | None
    lpips: Callable[[Tensor, Tensor], Tensor] | None

    @torch.no_grad()
    def __call__(self, image_BCHW: Tensor, original_BCHW: Tensor) -> dict[str, Tensor]:
        """Return `psnr`, `ssim`, `psnr_bilinear` and `lpips` of each image, (B,) fp32; see `image_quality`.

        `psnr_bilinear` is the baseline without a network: the original's means over its squares, upsampled bilinearly
        (half-pixel centres). Both sides are multiples of `multiple`.
        """
        measures = {} if self.lpips is None else {"lpips": self.lpips(image_BCHW.clamp(0, 1), original_BCHW)}
        if self.multiple is None:
            return measures
        small_BChw, size = functional.avg_pool2d(original_BCHW, self.multiple), original_BCHW.shape[-2:]
        bilinear_BCHW = functional.interpolate(small_BChw, size, mode="bilinear", align_corners=False)
        beaten = {"psnr_bilinear": psnr(bilinear_BCHW, original_BCHW)}
        return measures | image_quality(image_BCHW, original_BCHW) | beaten


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
        """Load the frozen network in fp32; on the meta device without values.

        `weights` is a file with torchvision's names, such as `features.0.weight`; else a ConfigError names `key`.
        `linear` are weights of each channel of each compared layer, (C,) each; None = 1, not LPIPS.
        """
        from torchvision.models.vgg import cfgs, make_layers

        with torch.device("meta"):
            features = make_layers(cfgs["D"])
        if device.type != "meta":
            _read_features(features, weights, device, key)
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


def _read(weights: str, *, key: str, wanted: str, prefix: str = "") -> dict[str, Tensor]:
    """Read a file that the user has to fetch; a ConfigError names the `wanted` one."""
    try:
        return read_belonging(weights, key, None, lambda name: name.startswith(prefix))
    except ConfigError as error:
        raise ConfigError(f"{error}. Give {wanted}, or null") from error


def _read_features(features: nn.Sequential, weights: str, device: torch.device, key: str) -> None:
    state = _read(weights, key=key, wanted=VGG, prefix="features.")
    found = {name.removeprefix("features."): copy_to(value, torch.float32, device) for name, value in state.items()}
    what, remedy = "not the features of VGG-16", f"give {VGG}, or null"
    check_fit(shapes_of(features.state_dict()), shapes_of(found), f"{key}={weights}", what=what, remedy=remedy)
    features.load_state_dict(found, assign=True)


def load_lpips(weights: str, *, device: torch.device, key: str) -> FeatureDistance:
    """Return LPIPS on VGG-16, version 0.1, with the channel weights that torchmetrics ships.

    `weights` is a file of VGG-16, see `FeatureDistance`; `key` the config key that named it.
    """
    check_installed()
    from torchmetrics.functional.image import lpips

    file = Path(lpips.__file__).parent / "lpips_models" / "vgg.pth"
    state = _read(str(file), key=key, wanted=VGG)
    layers = [state[f"lin{number}.model.1.weight"] for number in range(len(LAYERS))]
    linear = [copy_to(layer, torch.float32, device).flatten() for layer in layers]
    return FeatureDistance(weights, device=device, linear=linear, key=key)


def load_inception(
    weights: str, *, device: torch.device, key: str, antialias: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the features of FID's Inception V3: (B, 3, H, W) float, clamped to [0, 1], to (B, 2048) fp32.

    Images are rounded to bytes and resized to 299 x 299 as in the first implementation (Heusel et al. 2017), or, with
    `antialias`, as by clean-fid (`resize_clean`). `weights` is a file with the names of torch-fidelity and
    pytorch-fid; else a ConfigError names `key`.
    """
    if find_spec("torch_fidelity") is None:
        raise ConfigError(
            f"{key} is measured by the library torch-fidelity, which is not installed. {install_hint('metrics')}."
        )
    from torch_fidelity import FeatureExtractorInceptionV3

    state = _read(weights, key=key, wanted=INCEPTION)
    with tempfile.TemporaryDirectory() as folder:  # the library unpickles its file: this copy is harmless
        torch.save(state, Path(folder) / "inception.pth")
        try:
            module = FeatureExtractorInceptionV3("fid", ["2048"], str(Path(folder) / "inception.pth"))
        except RuntimeError as error:
            raise ConfigError(
                f"{key}={weights}: is not FID's Inception V3, but holds {next(iter(state), 'nothing')}; give "
                f"{INCEPTION}, or null"
            ) from error
    module.to(device)
    layers = nn.Sequential(*list(module.children())[:-1], nn.Flatten())  # as its forward, without the classifier

    @torch.no_grad()
    def features(image_BCHW: Tensor) -> Tensor:
        pixels_BCHW = (image_BCHW.float().clamp(0, 1) * 255).round().to(torch.uint8)
        if antialias:
            small_BCHW = torch.stack([resize_clean(pixels_CHW) for pixels_CHW in pixels_BCHW.cpu()]).to(device)
            return layers((small_BCHW - 128) / 128)
        return module(pixels_BCHW)[0]

    return features


def resize_clean(pixels_CHW: Tensor, side: int = 299) -> Tensor:
    """Return a picture (3, H, W) uint8 as (3, side, side) fp32 in [0, 255], as clean-fid resizes it.

    Antialiased bicubic, each channel as fp32 and not rounded (Parmar et al. 2022, section 3).
    """
    channels = [Image.fromarray(channel.astype(np.float32)) for channel in pixels_CHW.numpy()]
    small = [np.asarray(each.resize((side, side), Image.Resampling.BICUBIC)).clip(0, 255) for each in channels]
    return torch.from_numpy(np.stack(small))


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


class ClipScore:
    """Cosine of the embeddings of a picture and its caption, times 100 (Hessel et al. 2021, without their factor 2.5).

    As torchmetrics' `CLIPScore`, but that a caption too long for the tower keeps its end token.
    """

    def __init__(self, weights: str, *, device: torch.device, key: str) -> None:
        """Load the frozen towers in fp32 with their own preprocessing and tokenizer, without a download.

        `weights` is a folder of transformers, such as a copy of openai/clip-vit-large-patch14; else a ConfigError.
        """
        from transformers import CLIPModel, CLIPProcessor  # takes seconds

        if not Path(weights).is_dir():
            raise ConfigError(
                f"{key}={weights}: no such folder. Name a local folder of a CLIP, with weights, preprocessor and "
                "tokenizer, e.g. by: hf download openai/clip-vit-large-patch14 --local-dir clip"
            )
        try:
            model: Any = CLIPModel.from_pretrained(weights, dtype=torch.float32, local_files_only=True)
            self._processor: Any = CLIPProcessor.from_pretrained(weights, local_files_only=True)
            if not any((Path(weights) / name).is_file() for name in ("vocab.json", "tokenizer.json")):
                raise ValueError("its tokenizer is missing")  # transformers makes one without words
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{key}={weights}: is no whole CLIP of transformers, with weights, preprocessor and tokenizer: {reason}"
            ) from error
        check_dtypes(weights, key=key)
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device
        self._room = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], captions: Sequence[str]) -> Tensor:
        """Return the score of each picture (3, H, W) uint8, in [-100, 100], (B,) fp32 on the host; higher is better."""
        text = self._processor(
            text=list(captions), return_tensors="pt", padding=True, truncation=True, max_length=self._room
        )
        pixels = self._processor(images=[image.cpu() for image in images], return_tensors="pt")
        found = self._model(**text.to(self._device), pixel_values=pixels["pixel_values"].to(self._device))
        return 100 * (found.image_embeds * found.text_embeds).sum(dim=-1).cpu()
