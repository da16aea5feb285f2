"""Training of the previewer: semantic latents to small images for people, of a compressor that may train along.

Shape legend: B batch, H W image size, h w size of the preview.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from cascade_train.batch import Batch
from cascade_train.models.image_quality import image_quality
from cascade_train.models.stage import Stage
from cascade_train.options import check_least
from cascade_train.tasks.base import Export, Phase, StepOutput, Task, weighted
from cascade_train.tasks.pictures import PictureObjective, PictureTask, PreparedPictures
from cascade_train.tasks.reconstruction import COMPRESSOR, children, load_parts, part_exports, parts_of

PREVIEWER = "previewer"
"""Name among the stage's parts, the phase's modules and the exports."""


@dataclass(kw_only=True, eq=False)
class Preview(PictureObjective):
    """How a preview is scored: by its pixels.

    Args:
        latent_noise: standard deviation of noise on the latents in training: the previewer becomes robust to errors of
            Stage C, and a compressor that trains along to noise; 0 = none.
    """

    fits: ClassVar[tuple[str, ...]] = ("previewer",)
    options: ClassVar[tuple[str, ...]] = ("train_compressor",)

    latent_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("latent_noise", self.latent_noise, 0.0, "it is a standard deviation")

    def task(self, reconstruction: Any) -> Task:
        """Training of a previewer."""
        return Previewing(self, train_compressor=reconstruction.train_compressor)


@dataclass(kw_only=True)
class PreparedLatentNoise(PreparedPictures):
    """A micro-batch with noise of the latents, (B, C, H / 32, W / 32) fp32 standard normal; None = no noise."""

    noise_BCHW: Tensor | None


class Previewing(PictureTask):
    """Trains every weight of a previewer on the latents of its compressor, which may train along."""

    fits = ("previewer",)
    result = "preview"
    stage: Any  # with a previewer and a semantic compressor

    def __init__(self, objective: Preview, *, train_compressor: bool) -> None:
        self.objective = objective
        self.train_compressor = train_compressor

    def trained_parts(self) -> frozenset[str]:
        """Previewer, and the compressor where it trains along."""
        return frozenset({PREVIEWER, COMPRESSOR} if self.train_compressor else {PREVIEWER})

    def unbuilt_parts(self) -> frozenset[str]:
        """All but the compressor and the previewer."""
        return frozenset({"network", "text_encoder", "image_encoder"})

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage and unfreeze the previewer; norms keep their statistics."""
        super().attach(stage, objective, device)
        for root in self._roots().values():
            root.requires_grad_(requires_grad=True)

    def _roots(self) -> dict[str, nn.Module]:
        return parts_of(self.stage, self.trained_parts())

    def phases(self) -> list[Phase]:
        """The one phase; the compressor is its second root where it trains."""
        return [Phase(name="train", modules=self._roots(), units=children(self._roots()), loss=self.loss)]

    def prepare_batch(self, batch: Batch) -> PreparedLatentNoise:
        """Draw the latents' noise, and copy to the device."""
        pictures, noise_BCHW = super().prepare_batch(batch), None
        if self.objective.latent_noise > 0.0:
            shape = self.stage.latent_shape(*pictures.image_BCHW.shape[-2:])
            noise_BCHW = self._copy(batch.normal("latent_noise", shape))
        return PreparedLatentNoise(**vars(pictures), noise_BCHW=noise_BCHW)

    def loss(self, prepared: PreparedLatentNoise) -> StepOutput:
        """Distance of the previews from the pictures at their size, (B,). Does not sync."""
        latent_BCHW = self.stage.encode(prepared.image_BCHW)
        if prepared.noise_BCHW is not None:
            latent_BCHW = latent_BCHW + self.objective.latent_noise * prepared.noise_BCHW
        loss_raw_B = self._distance(prepared, *self._pair(prepared.image_BCHW, latent_BCHW))
        return StepOutput(loss_B=weighted(loss_raw_B, prepared.weight_B), report={"loss_raw": loss_raw_B.detach()})

    @torch.no_grad()
    def measures(self, prepared: PreparedLatentNoise, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """PSNR and SSIM of the previews, without a mask; latents get no noise."""
        pair = self._pair(prepared.image_BCHW, self.stage.encode(prepared.image_BCHW))
        return image_quality(*pair)

    def _pair(self, image_BCHW: Tensor, latent_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Previews, not clamped, and the pictures at their size, (B, 3, h, w) fp32 each."""
        preview_BChw = self.stage.previewer.decode(latent_BCHW)
        return preview_BChw, interpolate(image_BCHW, preview_BChw.shape[-2:], mode="area")

    def _distance(self, prepared: PreparedPictures, preview_BChw: Tensor, original_BChw: Tensor) -> Tensor:
        mask_B1HW = prepared.mask_B1HW
        small = None if mask_B1HW is None else interpolate(mask_B1HW, preview_BChw.shape[-2:], mode="area")
        return self.objective.pixels(preview_BChw, original_BChw, small)

    def exports(self) -> Mapping[str, Export]:
        """`previewer`, which `model.previewer.weights` takes, and a compressor that trained along."""
        return part_exports(self._roots())

    def load_export(self, export: Path) -> None:
        """Load the previewer, and a compressor that trained along."""
        load_parts(self._roots(), export)
