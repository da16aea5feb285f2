"""Training of Stage A: images to latents and back, with a codebook and, from a given step on, a discriminator.

Shape legend: B batch, G samples of the global batch, C latent channels, H W image size, h w latent size, K codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.models.image_quality import FeatureDistance, image_quality
from cascade_train.models.networks.discriminator import PatchDiscriminator, build_discriminator
from cascade_train.models.networks.vq_network import count_codes, revive, unused_since
from cascade_train.models.stage import Save, Stage
from cascade_train.models.stage_a import StageA
from cascade_train.options import File, check_within
from cascade_train.tasks.base import Draws, Export, Phase, SampleSettings, StepOutput, Task, weighted
from cascade_train.tasks.pictures import PictureObjective, PictureTask, PreparedPictures, RoundTrip
from cascade_train.tasks.reconstruction import Reconstruction

CANDIDATES = 8
"""Latents that each sample offers to dead codes in a step."""

_MAX_WEIGHT = 1.0e6
_MAX_STEP = 1_000_000_000_000


@dataclass(kw_only=True, eq=False)
class Perceptual:
    """A distance between features of pictures (Johnson et al. 2016), switched on by weights of VGG-16.

    Args:
        weights: a file of torchvision's VGG-16 (`vgg16-397923af.pth`, or as safetensors); null = off.
        weight: of this term beside the pixels'.
        start_step: first optimizer step in which it counts.
    """

    weights: File[str | None]
    weight: float
    start_step: int

    def __post_init__(self) -> None:
        check_within("perceptual.weight", self.weight, 0.0, _MAX_WEIGHT)
        check_within("perceptual.start_step", self.start_step, 1, _MAX_STEP)

    def build(self, device: torch.device) -> FeatureDistance | None:
        """Return the distance on `device`; None = off."""
        return None if self.weights is None else FeatureDistance(self.weights, device=device)


@dataclass(kw_only=True, eq=False)
class Adversarial:
    """A patch discriminator that trains beside the autoencoder (Esser et al. 2021, eq. 4 to 7), off at first.

    Args:
        start_step: optimizer step from which it trains and counts in the autoencoder's loss; null = never.
        weight: of this term beside the reconstruction's, after the adaptive weight.
        max_weight: largest adaptive weight.
        channels: width of the discriminator's first layer.
        layers: its strided layers.
        seed: of its first values.
    """

    start_step: int | None
    weight: float
    max_weight: float
    channels: int
    layers: int
    seed: int

    def __post_init__(self) -> None:
        if self.start_step is not None:
            check_within("adversarial.start_step", self.start_step, 1, _MAX_STEP)
        check_within("adversarial.weight", self.weight, 0.0, _MAX_WEIGHT)
        check_within("adversarial.max_weight", self.max_weight, 0.0, _MAX_WEIGHT)
        check_within("adversarial.channels", self.channels, 1, 4096)
        check_within("adversarial.layers", self.layers, 1, 8)

    def build(self, device: torch.device) -> PatchDiscriminator | None:
        """Return the discriminator on `device`, fp32; None = off."""
        if self.start_step is None:
            return None
        return build_discriminator(channels=self.channels, layers=self.layers, seed=self.seed, device=device)


@dataclass(kw_only=True, eq=False)
class Vqgan(PictureObjective):
    """How an autoencoder with a codebook is scored (van den Oord et al. 2017, eq. 3; Esser et al. 2021).

    Args:
        codebook_weight: of the loss that pulls codes to the latents that chose them.
        commitment_weight: of the loss that pulls latents to their codes; beta of the paper.
        quantised_share: share of training samples whose codes are decoded; of the others, the latents themselves are,
            as Stage B uses Stage A.
        revive_after_steps: optimizer steps after which a code that no latent of a global batch has chosen takes the
            place of one of the batch's latents; null = never.
        train_encoder: whether encoder and codebook train.
        train_decoder: whether the decoder trains.
        perceptual: a distance between features.
        adversarial: a discriminator.

    Raises:
        ValueError: nothing trains.
    """

    fits: ClassVar[tuple[str, ...]] = ("stage_a",)

    codebook_weight: float
    commitment_weight: float
    quantised_share: float
    revive_after_steps: int | None
    train_encoder: bool
    train_decoder: bool
    perceptual: Perceptual
    adversarial: Adversarial

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("codebook_weight", self.codebook_weight, 0.0, _MAX_WEIGHT)
        check_within("commitment_weight", self.commitment_weight, 0.0, _MAX_WEIGHT)
        check_within("quantised_share", self.quantised_share, 0.0, 1.0)
        if self.revive_after_steps is not None:
            check_within("revive_after_steps", self.revive_after_steps, 1, _MAX_STEP)
        if not (self.train_encoder or self.train_decoder):
            raise ValueError("objective.train_encoder=false, objective.train_decoder=false: nothing would train")

    def task(self, reconstruction: Reconstruction) -> Task:
        """Return the training of Stage A."""
        return Autoencoding(self)

    def codes(self, latent_BChw: Tensor, code_BChw: Tensor) -> Tensor:
        """Return the weighted sum of codebook and commitment loss, (B,) fp32."""
        to_latent_B = (code_BChw - latent_BChw.detach()).square().mean(dim=(1, 2, 3))
        to_code_B = (latent_BChw - code_BChw.detach()).square().mean(dim=(1, 2, 3))
        return self.codebook_weight * to_latent_B + self.commitment_weight * to_code_B


@dataclass(kw_only=True)
class PreparedImages(PreparedPictures):
    """A micro-batch of pictures with the random choices of Stage A's training.

    Attributes:
        quantised_B: (B,) bool, whose codes are decoded in training.
        position_BM: (B, M) fp32 uniform in [0, 1), which of its latents a sample offers to dead codes.
        made_BCHW: (B, 3, H, W) reconstructions of the first phase, for the discriminator; None = not made yet.
    """

    quantised_B: Tensor
    position_BM: Tensor
    made_BCHW: Tensor | None = None


class Autoencoding(PictureTask):
    """Trains Stage A's encoder, codebook and decoder, or parts of them."""

    fits = ("stage_a",)
    trains_network = True
    stage: StageA

    def __init__(self, objective: Vqgan) -> None:
        self.objective = objective
        self._step = 1
        self._unused_K: Tensor
        self._kept: dict[str, Tensor] = {}

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage, freeze the half that does not train, and build discriminator and features."""
        super().attach(stage, objective, device)
        network = self.stage.network
        network.requires_grad_(requires_grad=True)
        for trains, modules in (
            (self.objective.train_encoder, network.encoder_modules()),
            (self.objective.train_decoder, network.decoder_modules()),
        ):
            for module in modules:
                module.requires_grad_(trains)
        # A gathered state has no frozen weights in it; exports need them.
        self._kept = {n: p.detach().cpu().clone() for n, p in network.named_parameters() if not p.requires_grad}
        self._unused_K = torch.zeros(self.stage.num_vq_embeddings, dtype=torch.int64, device=device)
        self.discriminator = self.objective.adversarial.build(device)
        self.features = self.objective.perceptual.build(device)

    def phases(self) -> list[Phase]:
        """Return the autoencoder's phase and, where there is one, the discriminator's."""
        network = self.stage.network
        phase = Phase(
            name="train",
            modules={"network": network},
            units={"network": self.stage.units()},
            loss=self.loss,
            rewritten=True,  # dead codes are revived
        )
        if self.discriminator is None or self.objective.adversarial.start_step is None:
            return [phase]
        discriminator = Phase(
            name="discriminator",
            modules={"discriminator": self.discriminator},
            units={"discriminator": self.discriminator.units()},
            loss=self.discriminator_loss,
            start_step=self.objective.adversarial.start_step,
            averaged=False,
        )
        return [phase, discriminator]

    def prepare_batch(self, batch: Batch) -> PreparedImages:
        """Draw which samples are quantised and which latents are offered to dead codes, and copy to the device."""
        places = [torch.rand(CANDIDATES, generator=g) for g in batch.generators("candidates")]
        return PreparedImages(
            **vars(super().prepare_batch(batch)),
            quantised_B=self._copy(batch.uniform("quantised") < self.objective.quantised_share),
            position_BM=self._copy(torch.stack(places)),
        )

    def loss(self, prepared: PreparedImages) -> StepOutput:
        """Return the autoencoder's loss (B,); `loss_raw` is the distance of pixels. Does not sync."""
        made = self.stage.network(prepared.image_BCHW, quantised_B=prepared.quantised_B)
        value_B, gradient_BCHW, report = self._judge(made.image_BCHW.detach(), prepared)
        codes_B = self.objective.codes(made.latent_BChw, made.code_BChw)
        loss_B = with_gradient(made.image_BCHW, value_B, gradient_BCHW) + codes_B
        prepared.made_BCHW = made.image_BCHW.detach()
        report |= {"loss_codes": codes_B.detach(), "candidates": self._candidates(made.latent_BChw, prepared)}
        counts_K = count_codes(made.index_Bhw, len(self._unused_K))
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report=report, totals={"code_counts": counts_K})

    def _judge(self, made_BCHW: Tensor, prepared: PreparedImages) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss (B,) of reconstructions, its gradient at them (B, 3, H, W), and a report.

        Differentiated here and not in the whole network's backward pass: the adaptive weight needs both gradients, and
        the discriminator's weights must get none. Features and discriminator see the original where a mask is 0.
        """
        objective, leaf_BCHW = self.objective, made_BCHW.requires_grad_()
        image_BCHW, mask_B1HW = prepared.image_BCHW, prepared.mask_B1HW
        with torch.enable_grad():
            pixels_B = objective.pixels(leaf_BCHW, image_BCHW, mask_B1HW)
            seen_BCHW = unmasked(leaf_BCHW, image_BCHW, mask_B1HW)
            value_B, report = pixels_B, {"loss_raw": pixels_B.detach()}
            if self.features is not None and self._step >= objective.perceptual.start_step:
                distance_B = self.features(seen_BCHW, image_BCHW)
                value_B = value_B + objective.perceptual.weight * distance_B
                report["loss_perceptual"] = distance_B.detach()
            (gradient_BCHW,) = torch.autograd.grad(value_B.sum(), leaf_BCHW)
            if self._discriminator_active():
                fooled_B = -self.discriminator(seen_BCHW).mean(dim=(1, 2))  # type: ignore[misc]
                (other_BCHW,) = torch.autograd.grad(fooled_B.sum(), leaf_BCHW)
                weight_B = adaptive_weight(gradient_BCHW, other_BCHW, most=objective.adversarial.max_weight)
                share_B = objective.adversarial.weight * weight_B
                gradient_BCHW = gradient_BCHW + share_B[:, None, None, None] * other_BCHW
                value_B = value_B + share_B * fooled_B
                report |= {"loss_adversarial": fooled_B.detach(), "adaptive_weight": weight_B}
        return value_B.detach(), gradient_BCHW, report

    def _discriminator_active(self) -> bool:
        start = self.objective.adversarial.start_step
        return self.discriminator is not None and start is not None and self._step >= start

    def discriminator_loss(self, prepared: PreparedImages) -> StepOutput:
        """Return the discriminator's loss (B,) on images and on what the autoencoder made of them. Does not sync."""
        if self.discriminator is None:
            raise AssertionError("no discriminator, no phase of its own")
        made_BCHW = prepared.made_BCHW
        if made_BCHW is None:
            with torch.no_grad():
                made_BCHW = self.stage.network(prepared.image_BCHW, quantised_B=prepared.quantised_B).image_BCHW
        seen_BCHW = unmasked(made_BCHW.detach(), prepared.image_BCHW, prepared.mask_B1HW)
        real, fake = self.discriminator(torch.cat([prepared.image_BCHW, seen_BCHW])).chunk(2)
        loss_B = hinge(real, fake)
        report = {"loss_raw": loss_B.detach()}
        report |= {f"score_{name}": each.detach().mean(dim=(1, 2)) for name, each in (("real", real), ("made", fake))}
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report=report)

    def _candidates(self, latent_BChw: Tensor, prepared: PreparedImages) -> Tensor:
        """Return the latents that samples offer to dead codes, (B, M C), at the places drawn for them."""
        rows_BNC = latent_BChw.detach().flatten(2).transpose(1, 2)
        place_BM = (prepared.position_BM * rows_BNC.shape[1]).long()
        return rows_BNC.gather(1, place_BM[..., None].expand(-1, -1, rows_BNC.shape[2])).flatten(1)

    @torch.no_grad()
    def measures(self, prepared: PreparedImages, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """Return the distance of pixels, PSNR and SSIM of reconstructions, and the PSNR of quantised ones.

        A mask counts in the distance alone. A `scale_factor` of `latent_rms` gives latents of about unit variance.
        """
        image_BCHW = prepared.image_BCHW
        made = self.stage.network(image_BCHW)
        quantised = self.stage.network(image_BCHW, quantised_B=torch.ones_like(prepared.quantised_B)).image_BCHW
        return {
            "loss": self.objective.pixels(made.image_BCHW, image_BCHW, prepared.mask_B1HW),
            **image_quality(made.image_BCHW, image_BCHW),
            "psnr_quantised": image_quality(quantised, image_BCHW)["psnr"],
            "latent_rms": made.latent_BChw.square().mean(dim=(1, 2, 3)).sqrt(),
        }

    def painter(self, settings: SampleSettings, size: Sequence[int]) -> Reconstructor:
        """Return what shows reconstructions from latents, and beside them from codes; samplers have no part in it."""
        return Reconstructor(self.stage, self.result)

    def exports(self) -> Mapping[str, Export]:
        """Return what the stage writes, with the weights that did not train."""
        saves = self.stage.exports()
        return {n: Export(module=self.stage.network, write=partial(self._write, save)) for n, save in saves.items()}

    def _write(self, save: Save, state: Mapping[str, Tensor], directory: Path) -> float:
        return save({**self._kept, **state}, directory)

    def after_step(self, report: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Count the codes that the global batch chose, revive dead ones, and return the share of those in use."""
        self._unused_K = unused_since(self._unused_K, report["code_counts"])
        used = (report["code_counts"] > 0).float().mean()
        after_steps = self.objective.revive_after_steps
        if after_steps is not None and self.objective.train_encoder:
            candidate_GC = report["candidates"].reshape(-1, self.stage.latent_channels)
            weight = self.stage.network.vquantizer.embedding.weight
            self._unused_K = revive(weight, self._unused_K, candidate_GC, after_steps=after_steps)
        self._step += 1
        return {"codes_used": used}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step and for how many steps each code has not been chosen."""
        return {"step": torch.tensor(self._step), "unused": self._unused_K}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._step = int(state["step"])
        self._unused_K = state["unused"].to(self.device, copy=True)


class Reconstructor(RoundTrip):
    """Shows pictures after a round trip through encoder and decoder."""

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Return reconstructions from codes alone."""
        quantised_B = torch.ones(len(image_BCHW), dtype=torch.bool, device=image_BCHW.device)
        return {"from codes": self.stage.network(image_BCHW, quantised_B=quantised_B).image_BCHW.clamp(0, 1)}


def unmasked(made_BCHW: Tensor, image_BCHW: Tensor, mask_B1HW: Tensor | None) -> Tensor:
    """Return what was made, (B, 3, H, W), with the original where the mask is 0."""
    return made_BCHW if mask_B1HW is None else image_BCHW + mask_B1HW * (made_BCHW - image_BCHW)


def adaptive_weight(gradient_BCHW: Tensor, other_BCHW: Tensor, *, most: float) -> Tensor:
    """Return the ratio of norms of two gradients (B, 3, H, W), the second the adversarial loss's, (B,) in [0, most].

    Esser et al. 2021, eq. 7, with two differences: gradients are taken at the reconstruction, which is never sharded,
    not at the decoder's last layer; and each sample has its own weight, whatever its rank and micro-batch.
    """
    length_B, other_B = (torch.linalg.vector_norm(g.flatten(1), dim=1) for g in (gradient_BCHW, other_BCHW))
    return torch.clamp(length_B / other_B.clamp(min=torch.finfo(torch.float32).tiny), 0.0, most)


def hinge(score_real: Tensor, score_fake: Tensor) -> Tensor:
    """Return the discriminator's loss (B,) of scores (B, h, w) (Lim and Ye 2017), half of each."""
    shortfall = torch.relu(1 - score_real) + torch.relu(1 + score_fake)
    return 0.5 * shortfall.mean(dim=(1, 2))


def with_gradient(at_BCHW: Tensor, value_B: Tensor, gradient_BCHW: Tensor) -> Tensor:
    """Return `value_B` as a function of `at_BCHW` with the given gradient: passes it to the network below."""
    linear_B = (at_BCHW * gradient_BCHW.detach()).sum(dim=(1, 2, 3))
    return value_B.detach() + (linear_B - linear_B.detach())
