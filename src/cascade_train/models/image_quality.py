"""How near a reconstruction comes to its original.

Shape legend: B batch, H W image size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.errors import ConfigError, install_hint


def check_installed() -> None:
    """Check that the library of metrics is there.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("torchmetrics") is None:
        raise ConfigError(
            "Reconstructions are measured by the library torchmetrics, which is not installed. "
            f"{install_hint('metrics')}."
        )


def image_quality(image_BCHW: Tensor, original_BCHW: Tensor) -> dict[str, Tensor]:
    """Return `psnr` in decibels and `ssim` (Wang et al. 2004) of each image, (B,) fp32; higher is better.

    Args:
        image_BCHW: (B, 3, H, W) float; counted within [0, 1].
        original_BCHW: (B, 3, H, W) float in [0, 1].
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
    """Measures how near pictures that a stage made come to their originals.

    Attributes:
        multiple: pixels of a side of the squares that a stage has one semantic latent each for; None = it has none,
            and only `lpips` is measured.
        lpips: a distance of pictures, see `perceptual.load_lpips`; None = not measured.
    """

    multiple: int | None
    lpips: Callable[[Tensor, Tensor], Tensor] | None

    @torch.no_grad()
    def __call__(self, image_BCHW: Tensor, original_BCHW: Tensor) -> dict[str, Tensor]:
        """Return `psnr`, `ssim`, `psnr_bilinear` and `lpips` of each image, (B,) fp32.

        `psnr_bilinear` needs no network and is what a stage has to beat: the original's means over its squares,
        brought back bilinearly (half-pixel centres).

        Args:
            image_BCHW: (B, 3, H, W) float; counted within [0, 1].
            original_BCHW: (B, 3, H, W) float in [0, 1]; both sides are multiples of `multiple`.
        """
        measures = {} if self.lpips is None else {"lpips": self.lpips(image_BCHW.clamp(0, 1), original_BCHW)}
        if self.multiple is None:
            return measures
        small_BChw, size = functional.avg_pool2d(original_BCHW, self.multiple), original_BCHW.shape[-2:]
        bilinear_BCHW = functional.interpolate(small_BChw, size, mode="bilinear", align_corners=False)
        beaten = {"psnr_bilinear": psnr(bilinear_BCHW, original_BCHW)}
        return measures | image_quality(image_BCHW, original_BCHW) | beaten
