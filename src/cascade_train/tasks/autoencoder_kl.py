"""Training of a KL autoencoder: images to latents, as a normal distribution, and back.

Shape legend: B batch, C latent channels, H W image size, h w latent size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.models.autoencoder_kl import VAEStage
from cascade_train.models.image_quality import FeatureDistance, image_quality, load_lpips
from cascade_train.models.networks.kl_network import Reconstructed
from cascade_train.options import check_within
from cascade_train.tasks.autoencoding import MAX_WEIGHT, AutoencoderObjective, AutoencoderTask, Perceptual
from cascade_train.tasks.base import StepOutput, Task, weighted
from cascade_train.tasks.pictures import PreparedPictures


@dataclass(kw_only=True, eq=False)
class Lpips(Perceptual):
    """LPIPS on VGG-16, version 0.1 (Zhang et al. 2018), switched on by weights of VGG-16."""

    def build(self, device: torch.device) -> FeatureDistance | None:
        """Distance on `device`; None = off."""
        if self.weights is None:
            return None
        return load_lpips(self.weights, device=device, key="objective.perceptual.weights")


@dataclass(kw_only=True, eq=False)
class AutoencoderKL(AutoencoderObjective):
    """How a KL autoencoder is scored (Rombach et al. 2022, appendix G).

    The original's loss (ldm/modules/losses/contperceptual), divided by the number of values of a picture, so that a
    limit of the gradient's norm does not depend on its size. Pixels are compared in [-1, 1], as there.

    Args:
        kl_weight: of the divergence of a picture's latents from the standard normal distribution, summed over them,
            beside the distance of pixels, summed over these.
    """

    fits: ClassVar[tuple[str, ...]] = ("kl_autoencoder",)

    kl_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("kl_weight", self.kl_weight, 0.0, MAX_WEIGHT)

    def task(self, reconstruction: Any) -> Task:
        """Training of the autoencoder."""
        return AutoencodingKL(self)

    def pixels(self, image_BCHW: Tensor, original_BCHW: Tensor, mask_B1HW: Tensor | None = None) -> Tensor:
        """Mean distance of pixels in [-1, 1], (B,) fp32, of pictures (B, 3, H, W) in [0, 1]."""
        return super().pixels(2 * image_BCHW, 2 * original_BCHW, mask_B1HW)


@dataclass(kw_only=True)
class PreparedLatents(PreparedPictures):
    """A micro-batch of pictures, and of draws (B, C, h, w) fp32 standard normal for their latents."""

    normal_BChw: Tensor


class AutoencodingKL(AutoencoderTask):
    """Trains encoder and decoder of a KL autoencoder, or one of them."""

    fits = ("kl_autoencoder",)
    stage: VAEStage
    objective: AutoencoderKL

    def prepare_batch(self, batch: Batch) -> PreparedLatents:
        """Draw the latents' noise, and copy to the device."""
        pictures = super().prepare_batch(batch)
        shape = self.stage.latent_shape(*pictures.image_BCHW.shape[-2:])
        return PreparedLatents(**vars(pictures), normal_BChw=self._copy(batch.normal("posterior", shape)))

    def reconstruct(self, prepared: PreparedLatents) -> Reconstructed:
        """Network's reconstructions of a micro-batch, from latents that were drawn."""
        output: Reconstructed = self.stage.network(prepared.image_BCHW, normal_BChw=prepared.normal_BChw)
        return output

    def loss(self, prepared: PreparedLatents) -> StepOutput:
        """Autoencoder's loss (B,); `loss_raw` is the distance of pixels. Does not sync."""
        output = self.reconstruct(prepared)
        loss_B, report = self.judge(output.image_BCHW, prepared)
        loss_B = loss_B + self.objective.kl_weight * output.kl_B / prepared.image_BCHW[0].numel()
        report |= {"kl": output.kl_B.detach()}
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report=report)

    @torch.no_grad()
    def measures(self, prepared: PreparedLatents, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """PSNR and SSIM of reconstructions from the latents' means, without a mask, and two measures of latents.

        `kl` is their divergence, `latent_rms` the root of the mean square of drawn latents: a `scaling_factor` of its
        inverse gives latents of about unit variance.
        """
        image_BCHW = prepared.image_BCHW
        output = self.stage.network(image_BCHW)
        square_BChw = output.mean_BChw.square() + output.std_BChw.square()
        return {
            **image_quality(output.image_BCHW, image_BCHW),
            "kl": output.kl_B,
            "latent_rms": square_BChw.mean(dim=(1, 2, 3)).sqrt(),
        }
