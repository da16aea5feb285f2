"""Training of an autoencoder with a codebook, such as Stage A, and the upkeep of that codebook.

Shape legend: B batch, G samples of the global batch, C latent channels, H W image size, h w latent size, K codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cascade_train.batch import Batch
from cascade_train.models.image_quality import image_quality
from cascade_train.models.stage import Stage
from cascade_train.options import Share, check_within
from cascade_train.tasks.autoencoding import (
    MAX_STEP,
    MAX_WEIGHT,
    Adversarial,
    AutoencoderObjective,
    AutoencoderTask,
    Perceptual,
)
from cascade_train.tasks.base import Draws, SampleSettings, StepOutput, Task, weighted
from cascade_train.tasks.pictures import PreparedPictures, RoundTrip

__all__ = ["Adversarial", "Perceptual"]
"""Named by saved configurations as members of this file."""

CANDIDATES = 8
"""Latents that each sample offers to dead codes in a step."""


@dataclass(kw_only=True, eq=False)
class Vqgan(AutoencoderObjective):
    """How an autoencoder with a codebook is scored (van den Oord et al. 2017, eq. 3; Esser et al. 2021).

    Args:
        codebook_weight: of the loss that pulls codes to the latents that chose them.
        commitment_weight: of the loss that pulls latents to their codes; beta of the paper.
        quantised_share: share of training samples whose codes are decoded; of the others, the latents themselves are,
            as Stage B uses Stage A.
        revive_after_steps: optimizer steps after which a code that no latent of a global batch has chosen takes the
            place of one of the batch's latents; null = never.
        train_encoder: whether encoder and codebook train.
    """

    fits: ClassVar[tuple[str, ...]] = ("vq_autoencoder",)

    codebook_weight: float
    commitment_weight: float
    quantised_share: Share[float]
    revive_after_steps: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("codebook_weight", self.codebook_weight, 0.0, MAX_WEIGHT)
        check_within("commitment_weight", self.commitment_weight, 0.0, MAX_WEIGHT)
        if self.revive_after_steps is not None:
            check_within("revive_after_steps", self.revive_after_steps, 1, MAX_STEP)

    def task(self, reconstruction: Any) -> Task:
        """Training of Stage A."""
        return Autoencoding(self)

    def codes(self, latent_BChw: Tensor, code_BChw: Tensor) -> Tensor:
        """Weighted sum of codebook and commitment loss, (B,) fp32."""
        to_latent_B = (code_BChw - latent_BChw.detach()).square().mean(dim=(1, 2, 3))
        to_code_B = (latent_BChw - code_BChw.detach()).square().mean(dim=(1, 2, 3))
        return self.codebook_weight * to_latent_B + self.commitment_weight * to_code_B


@dataclass(kw_only=True)
class PreparedImages(PreparedPictures):
    """A micro-batch of pictures with the random choices of Stage A's training.

    Attributes:
        quantised_B: (B,) bool, whose codes are decoded in training.
        position_BM: (B, M) fp32 uniform in [0, 1), which of its latents a sample offers to dead codes.
    """

    quantised_B: Tensor
    position_BM: Tensor


class Autoencoding(AutoencoderTask):
    """Trains Stage A's encoder, codebook and decoder, or parts of them."""

    fits = ("vq_autoencoder",)
    rewritten = True  # dead codes are revived
    stage: Any  # of an autoencoder with a codebook
    objective: Vqgan
    _unused_K: Tensor

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage; every code counts as just used."""
        super().attach(stage, objective, device)
        self._unused_K = torch.zeros(self.stage.num_vq_embeddings, dtype=torch.int64, device=device)

    def prepare_batch(self, batch: Batch) -> PreparedImages:
        """Draw which samples are quantised and which latents are offered to dead codes, and copy to the device."""
        places = [torch.rand(CANDIDATES, generator=g) for g in batch.generators("candidates")]
        return PreparedImages(
            **vars(super().prepare_batch(batch)),
            quantised_B=self._copy(batch.uniform("quantised") < self.objective.quantised_share),
            position_BM=self._copy(torch.stack(places)),
        )

    def reconstruct(self, prepared: PreparedImages) -> Any:
        """Network's reconstructions of a micro-batch, from codes in the samples drawn for them."""
        return self.stage.network(prepared.image_BCHW, quantised_B=prepared.quantised_B)

    def loss(self, prepared: PreparedImages) -> StepOutput:
        """Autoencoder's loss (B,); `loss_raw` is the distance of pixels. Does not sync."""
        output = self.reconstruct(prepared)
        loss_B, report = self.judge(output.image_BCHW, prepared)
        codes_B = self.objective.codes(output.latent_BChw, output.code_BChw)
        report |= {"loss_codes": codes_B.detach(), "candidates": self._candidates(output.latent_BChw, prepared)}
        counts_K = count_codes(output.index_Bhw, len(self._unused_K))
        loss_B = weighted(loss_B + codes_B, prepared.weight_B)
        return StepOutput(loss_B=loss_B, report=report, totals={"code_counts": counts_K})

    def _candidates(self, latent_BChw: Tensor, prepared: PreparedImages) -> Tensor:
        """Latents that samples offer to dead codes, (B, M C), at the places drawn for them."""
        rows_BNC = latent_BChw.detach().flatten(2).transpose(1, 2)
        place_BM = (prepared.position_BM * rows_BNC.shape[1]).long()
        return rows_BNC.gather(1, place_BM[..., None].expand(-1, -1, rows_BNC.shape[2])).flatten(1)

    @torch.no_grad()
    def measures(self, prepared: PreparedImages, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """PSNR and SSIM of reconstructions, and the PSNR of quantised ones, without a mask.

        A `scale_factor` of `latent_rms` gives latents of about unit variance.
        """
        image_BCHW = prepared.image_BCHW
        output = self.stage.network(image_BCHW)
        quantised = self.stage.network(image_BCHW, quantised_B=torch.ones_like(prepared.quantised_B)).image_BCHW
        return {
            **image_quality(output.image_BCHW, image_BCHW),
            "psnr_quantised": image_quality(quantised, image_BCHW)["psnr"],
            "latent_rms": output.latent_BChw.square().mean(dim=(1, 2, 3)).sqrt(),
        }

    def image_sampler(self, settings: SampleSettings, size: Sequence[int]) -> Reconstructor:
        """ImageSampler of reconstructions from latents, and beside them from codes, without a sampler."""
        return Reconstructor(self.stage, self.result)

    def after_step(self, report: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Count the codes that the global batch chose, revive dead ones, and return the share of those in use."""
        self._unused_K = unused_since(self._unused_K, report["code_counts"])
        used = (report["code_counts"] > 0).float().mean()
        after_steps = self.objective.revive_after_steps
        if after_steps is not None and self.objective.train_encoder:
            candidate_GC = report["candidates"].reshape(-1, self.stage.latent_channels)
            weight = self.stage.network.vquantizer.embedding.weight
            self._unused_K = revive(weight, self._unused_K, candidate_GC, after_steps=after_steps)
        return {**super().after_step(report), "codes_used": used}

    def state_dict(self) -> dict[str, Tensor]:
        """Step and for how many steps each code has not been chosen."""
        return {**super().state_dict(), "unused": self._unused_K}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._unused_K = state["unused"].to(self.device, copy=True)


class Reconstructor(RoundTrip):
    """Shows reconstructions from codes too."""

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Reconstructions from codes alone."""
        quantised_B = torch.ones(len(image_BCHW), dtype=torch.bool, device=image_BCHW.device)
        return {"from codes": self.stage.network(image_BCHW, quantised_B=quantised_B).image_BCHW.clamp(0, 1)}


def count_codes(index: Tensor, entries: int) -> Tensor:
    """How often each of the `entries` codes occurs among the numbers `index`, (K,) fp32."""
    flat = index.flatten()
    return torch.zeros(entries, device=flat.device).index_add_(0, flat, torch.ones(len(flat), device=flat.device))


def unused_since(unused_K: Tensor, count_K: Tensor) -> Tensor:
    """Steps since each code was chosen, (K,) int64, after a step that chose it so often."""
    return torch.where(count_K > 0, 0, unused_K + 1)


@torch.no_grad()
def revive(weight: nn.Parameter, unused_K: Tensor, candidate_GC: Tensor, *, after_steps: int) -> Tensor:
    """Replace codes that have not been chosen for `after_steps` steps by candidates, the lowest numbers first.

    The i-th dead code takes the i-th candidate; more dead codes than candidates wait. The same on every rank, without
    communication; does not sync, unless the weight is offloaded to the host. `weight` is (K, C), whole or this rank's
    shard; `unused_K` (K,) int64, the steps since each code was chosen; `candidate_GC` (G, C) fp32 latents of the step's
    global batch. Returns `unused_K`, 0 for codes that were replaced.
    """
    dead_K = unused_K >= after_steps
    place_K = dead_K.long().cumsum(0) - 1
    replaced_K = dead_K & (place_K < len(candidate_GC))
    rows_KC = candidate_GC[place_K.clamp(0, len(candidate_GC) - 1)]
    mine_K1, rows = (_own_rows(weight, whole) for whole in (replaced_K[:, None].to(rows_KC.dtype), rows_KC))
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    mine_K1, rows = mine_K1.to(local.device), rows.to(local.device, local.dtype)  # offloaded shards lie on the host
    local.copy_(torch.where(mine_K1 > 0, rows, local))
    return torch.where(replaced_K, 0, unused_K)


def _own_rows(weight: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's rows of a tensor that every rank has whole, without communication."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
