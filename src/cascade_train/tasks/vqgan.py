"""The objective of Stage A: how near a reconstruction is, what latents and codes owe each other, and an opponent.

Lives here: the terms of the loss, each per sample. Must not live here: who trains (autoencoding.py), the networks
(models/).

Shape legend: B batch, C latent channels, H W image size, h w latent size.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from cascade_train.diffusion.checks import check_choice, check_within
from cascade_train.models.discriminator import PatchDiscriminator, build_discriminator
from cascade_train.models.perceptual import FeatureDistance
from cascade_train.options import File
from cascade_train.tasks.pictures import PIXELS, pixel_distance

_MOST = 1.0e6


class Perceptual:
    """A distance between features of pictures (Johnson et al. 2016), switched on by weights of VGG-16.

    Args:
        weights: a file of torchvision's VGG-16 (`vgg16-397923af.pth`, or as safetensors); null = off.
        weight: of this term beside the pixels'.
        start_step: first optimizer step in which it counts.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(self, *, weights: File[str | None], weight: float, start_step: int) -> None:
        check_within("perceptual.weight", weight, 0.0, _MOST)
        check_within("perceptual.start_step", start_step, 1, 10**12)
        self.weights = weights
        self.weight = weight
        self.start_step = start_step

    def build(self, device: torch.device) -> FeatureDistance | None:
        """Return the distance on `device`; None = off.

        Raises:
            ConfigError: the weights are not there, or of another network.
        """
        return None if self.weights is None else FeatureDistance(self.weights, device=device)


class Adversarial:
    """A patch discriminator that trains beside the autoencoder (Esser et al. 2021, eq. 4 to 7), off at first.

    Args:
        start_step: optimizer step in which it begins to train, and to be listened to; null = never.
        weight: of this term beside the reconstruction's, after the adaptive weight.
        max_weight: largest adaptive weight.
        channels: width of the discriminator's first layer.
        layers: its strided layers.
        seed: of its first values.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self, *, start_step: int | None, weight: float, max_weight: float, channels: int, layers: int, seed: int
    ) -> None:
        if start_step is not None:
            check_within("adversarial.start_step", start_step, 1, 10**12)
        check_within("adversarial.weight", weight, 0.0, _MOST)
        check_within("adversarial.max_weight", max_weight, 0.0, _MOST)
        check_within("adversarial.channels", channels, 1, 4096)
        check_within("adversarial.layers", layers, 1, 8)
        self.start_step = start_step
        self.weight = weight
        self.max_weight = max_weight
        self.channels = channels
        self.layers = layers
        self.seed = seed

    def build(self, device: torch.device) -> PatchDiscriminator | None:
        """Return the discriminator on `device`, fp32; None = off."""
        if self.start_step is None:
            return None
        return build_discriminator(channels=self.channels, layers=self.layers, seed=self.seed, device=device)


class Vqgan:
    """How an autoencoder with a codebook is scored (van den Oord et al. 2017, eq. 3; Esser et al. 2021).

    Args:
        pixel: l1 or l2, the distance between pictures.
        codebook_weight: pulls codes to the latents that chose them.
        commitment_weight: pulls latents to their codes; beta of the paper.
        quantised_share: share of training samples whose codes are decoded; of the others, the latents themselves, as
            Stage B uses Stage A.
        revive_after_steps: optimizer steps after which a code that no latent of a global batch has chosen takes the
            place of one of the batch's latents; null = never.
        train_encoder: whether encoder and codebook train.
        train_decoder: whether the decoder trains.
        perceptual: a distance between features.
        adversarial: an opponent.

    Raises:
        ConfigError: a number out of range.
        ValueError: nothing trains.

    Attributes:
        denoises: whether it is for what denoises latents.
        fits: names of the stages that it is for.
    """

    denoises: ClassVar[bool] = False
    fits: ClassVar[tuple[str, ...]] = ("stage_a",)

    def __init__(
        self,
        *,
        pixel: Literal["l1", "l2"],
        codebook_weight: float,
        commitment_weight: float,
        quantised_share: float,
        revive_after_steps: int | None,
        train_encoder: bool,
        train_decoder: bool,
        perceptual: Perceptual,
        adversarial: Adversarial,
    ) -> None:
        check_within("codebook_weight", codebook_weight, 0.0, _MOST)
        check_within("commitment_weight", commitment_weight, 0.0, _MOST)
        check_within("quantised_share", quantised_share, 0.0, 1.0)
        if revive_after_steps is not None:
            check_within("revive_after_steps", revive_after_steps, 1, 10**12)
        if not (train_encoder or train_decoder):
            raise ValueError("objective.train_encoder=false, objective.train_decoder=false: nothing would train")
        check_choice("pixel", pixel, PIXELS)
        self.pixel = pixel
        self.codebook_weight = codebook_weight
        self.commitment_weight = commitment_weight
        self.quantised_share = quantised_share
        self.revive_after_steps = revive_after_steps
        self.train_encoder = train_encoder
        self.train_decoder = train_decoder
        self.perceptual = perceptual
        self.adversarial = adversarial

    def pixels(self, image_BCHW: Tensor, original_BCHW: Tensor, mask_B1HW: Tensor | None = None) -> Tensor:
        """Return the mean distance of pixels, (B,) fp32; a mask in [0, 1] says how much each place counts."""
        return pixel_distance(image_BCHW, original_BCHW, self.pixel, mask_B1HW)

    def codes(self, latent_BChw: Tensor, code_BChw: Tensor) -> Tensor:
        """Return what latents and codes owe each other, (B,) fp32, weighted."""
        to_latent_B = (code_BChw - latent_BChw.detach()).square().mean(dim=(1, 2, 3))
        to_code_B = (latent_BChw - code_BChw.detach()).square().mean(dim=(1, 2, 3))
        return self.codebook_weight * to_latent_B + self.commitment_weight * to_code_B


def adaptive_weight(gradient_BCHW: Tensor, other_BCHW: Tensor, *, most: float) -> Tensor:
    """Return by how much the second loss counts so that its gradient is as long as the first's, (B,) in [0, most].

    Esser et al. 2021, eq. 7, with two differences: the gradients are those at the reconstruction, which no rank holds
    in shards, where the paper takes the decoder's last layer; and each sample has a weight of its own, so that neither
    ranks nor micro-batches change it.

    Args:
        gradient_BCHW: (B, 3, H, W) of the reconstruction's loss.
        other_BCHW: (B, 3, H, W) of the adversarial loss.
        most: largest weight.
    """
    length_B, other_B = (torch.linalg.vector_norm(g.flatten(1), dim=1) for g in (gradient_BCHW, other_BCHW))
    return torch.clamp(length_B / other_B.clamp(min=torch.finfo(torch.float32).tiny), 0.0, most)


def hinge(score_real: Tensor, score_fake: Tensor) -> Tensor:
    """Return the discriminator's loss (B,) of scores (B, h, w) (Lim and Ye 2017), half of each."""
    shortfall = torch.relu(1 - score_real) + torch.relu(1 + score_fake)
    return 0.5 * shortfall.mean(dim=(1, 2))


def with_gradient(at_BCHW: Tensor, value_B: Tensor, gradient_BCHW: Tensor) -> Tensor:
    """Return `value_B` as a function of `at_BCHW` whose gradient there, sample by sample, is `gradient_BCHW`.

    So a loss that was differentiated at a picture is handed on to what made the picture.
    """
    linear_B = (at_BCHW * gradient_BCHW.detach()).sum(dim=(1, 2, 3))
    return value_B.detach() + (linear_B - linear_B.detach())
