"""Training of Stage A: images to latents and back, with a codebook and, from a given step on, an opponent.

Lives here: what trains, the phases, and what is shown and measured. Must not live here: the terms of the loss
(vqgan.py), the networks (models/).

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
from cascade_train.models.codebook import count_codes, revive, unused_since
from cascade_train.models.formats.export import Exported
from cascade_train.models.formats.export_vqgan import save_original, save_vqgan
from cascade_train.models.image_quality import check_installed, image_quality
from cascade_train.models.stage import Stage
from cascade_train.models.stage_a import StageA
from cascade_train.tasks.base import Draws, Export, Phase, SampleSettings, StepOutput, Task
from cascade_train.tasks.pictures import RoundTrip, mask_of, pictures_of, weighted, where_it_counts
from cascade_train.tasks.vqgan import Vqgan, adaptive_weight, hinge, with_gradient

CANDIDATES = 8
"""Latents that each sample offers to dead codes in a step."""


@dataclass(kw_only=True)
class PreparedImages:
    """A micro-batch with every random choice made, on the device.

    Attributes:
        image_BCHW: (B, 3, H, W) fp32 in [0, 1].
        quantised_B: (B,) bool, whose codes are decoded in training.
        position_BM: (B, M) fp32 uniform in [0, 1), which of its latents a sample offers to dead codes.
        weight_B: (B,) fp32 weight of each sample's loss; None = 1 each.
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], how much each place counts; None = all of them fully.
        made_BCHW: (B, 3, H, W) what the first phase made of the images, for the discriminator; None = nothing yet.
    """

    image_BCHW: Tensor
    quantised_B: Tensor
    position_BM: Tensor
    weight_B: Tensor | None = None
    mask_B1HW: Tensor | None = None
    made_BCHW: Tensor | None = None


class Autoencoding(Task):
    """Trains Stage A's encoder, codebook and decoder, or parts of them; made by `Reconstruction`."""

    fits = ("stage_a",)
    reconstructs = ("stage_a",)
    trains_network = True
    needs_image = True

    def __init__(self, objective: Vqgan) -> None:
        """Store; `attach` takes the stage."""
        self.objective = objective
        self.stage: StageA
        self.device: torch.device
        self._step = 1
        self._unused_K: Tensor
        self._kept: dict[str, Tensor] = {}

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage, freeze the half that stays, and build the discriminator.

        Raises:
            ConfigError: weights of features that are not there, or no library to measure with.
        """
        if not isinstance(stage, StageA):
            raise AssertionError(f"an autoencoder is Stage A, not {stage.name}")
        check_installed()
        self.stage, self.device = stage, device
        network = stage.network
        network.requires_grad_(requires_grad=True)
        for trains, modules in (
            (self.objective.train_encoder, network.encoder_modules()),
            (self.objective.train_decoder, network.decoder_modules()),
        ):
            for module in modules:
                module.requires_grad_(trains)
        # A gathered state has no frozen weights in it; exports need them.
        self._kept = {n: p.detach().cpu().clone() for n, p in network.named_parameters() if not p.requires_grad}
        self._unused_K = torch.zeros(stage.codes, dtype=torch.int64, device=device)
        self.discriminator = self.objective.adversarial.build(device)
        self.features = self.objective.perceptual.build(device)

    def phases(self) -> list[Phase]:
        """Return the autoencoder's phase and, where there is an opponent, the discriminator's."""
        network = self.stage.network
        own = Phase(name="train", modules={"network": network}, units={"network": self.stage.units()}, loss=self.loss)
        if self.discriminator is None or self.objective.adversarial.start_step is None:
            return [own]
        opponent = Phase(
            name="discriminator",
            modules={"discriminator": self.discriminator},
            units={"discriminator": self.discriminator.units()},
            loss=self.opponents_loss,
            start_step=self.objective.adversarial.start_step,
            averaged=False,
        )
        return [own, opponent]

    def prepare_batch(self, batch: Batch) -> PreparedImages:
        """Draw who is quantised and which latents are offered to dead codes, and copy to the device."""
        places = [torch.rand(CANDIDATES, generator=g) for g in batch.generators("candidates")]
        return PreparedImages(
            image_BCHW=pictures_of(batch, self.device),
            quantised_B=(batch.uniform("quantised") < self.objective.quantised_share).to(self.device),
            position_BM=torch.stack(places).to(self.device),
            weight_B=None if batch.weight_B is None else batch.weight_B.to(self.device),
            mask_B1HW=mask_of(batch, self.device),
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
        the discriminator's weights shall get none. What a mask leaves out, features and opponent see as it is.
        """
        objective, leaf_BCHW = self.objective, made_BCHW.requires_grad_()
        image_BCHW, mask_B1HW = prepared.image_BCHW, prepared.mask_B1HW
        with torch.enable_grad():
            pixels_B = objective.pixels(leaf_BCHW, image_BCHW, mask_B1HW)
            seen_BCHW = where_it_counts(leaf_BCHW, image_BCHW, mask_B1HW)
            value_B, report = pixels_B, {"loss_raw": pixels_B.detach()}
            if self.features is not None and self._step >= objective.perceptual.start_step:
                distance_B = self.features(seen_BCHW, image_BCHW)
                value_B = value_B + objective.perceptual.weight * distance_B
                report["loss_perceptual"] = distance_B.detach()
            (gradient_BCHW,) = torch.autograd.grad(value_B.sum(), leaf_BCHW)
            if self._opponent_plays():
                fooled_B = -self.discriminator(seen_BCHW).mean(dim=(1, 2))  # type: ignore[misc]
                (other_BCHW,) = torch.autograd.grad(fooled_B.sum(), leaf_BCHW)
                weight_B = adaptive_weight(gradient_BCHW, other_BCHW, most=objective.adversarial.max_weight)
                share_B = objective.adversarial.weight * weight_B
                gradient_BCHW = gradient_BCHW + share_B[:, None, None, None] * other_BCHW
                value_B = value_B + share_B * fooled_B
                report |= {"loss_adversarial": fooled_B.detach(), "adaptive_weight": weight_B}
        return value_B.detach(), gradient_BCHW, report

    def _opponent_plays(self) -> bool:
        start = self.objective.adversarial.start_step
        return self.discriminator is not None and start is not None and self._step >= start

    def opponents_loss(self, prepared: PreparedImages) -> StepOutput:
        """Return the discriminator's loss (B,) on images and on what the autoencoder made of them. Does not sync."""
        if self.discriminator is None:
            raise AssertionError("no discriminator, no phase of its own")
        made_BCHW = prepared.made_BCHW
        if made_BCHW is None:
            with torch.no_grad():
                made_BCHW = self.stage.network(prepared.image_BCHW, quantised_B=prepared.quantised_B).image_BCHW
        seen_BCHW = where_it_counts(made_BCHW.detach(), prepared.image_BCHW, prepared.mask_B1HW)
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

        A mask counts in the first alone.

        `latent_rms` is what `scale_factor` should be for latents of about unit variance.
        """
        image_BCHW = prepared.image_BCHW
        made = self.stage.network(image_BCHW)
        everyone_B = torch.ones_like(prepared.quantised_B)
        quantised = self.stage.network(image_BCHW, quantised_B=everyone_B).image_BCHW
        return {
            "loss": self.objective.pixels(made.image_BCHW, image_BCHW, prepared.mask_B1HW),
            **image_quality(made.image_BCHW, image_BCHW),
            "psnr_quantised": image_quality(quantised, image_BCHW)["psnr"],
            "latent_rms": made.latent_BChw.square().mean(dim=(1, 2, 3)).sqrt(),
        }

    def painter(self, settings: SampleSettings, size: Sequence[int]) -> Reconstructor:
        """Return what shows pictures beside their reconstructions; the settings of samplers mean nothing here."""
        return Reconstructor(self.stage)

    def exports(self) -> Mapping[str, Export]:
        """Return `vqgan`, a folder that diffusers loads, and `stage_a`, the original's file."""
        savers = {"vqgan": save_vqgan, "stage_a": save_original}
        return {
            name: Export(module=self.stage.network, write=partial(self._write, save)) for name, save in savers.items()
        }

    def _write(self, save: Any, state: Mapping[str, Tensor], directory: Path) -> float:
        exported: Exported = save({**self._kept, **state}, self.stage.arguments, directory)
        return exported.max_error

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
    """Shows pictures after a way through encoder and decoder."""

    result: ClassVar[str] = "reconstruction"
    stage: StageA

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Return reconstructions from codes alone."""
        everyone_B = torch.ones(len(image_BCHW), dtype=torch.bool, device=image_BCHW.device)
        return {"from codes": self.stage.network(image_BCHW, quantised_B=everyone_B).image_BCHW.clamp(0, 1)}
