"""Training of the previewer: semantic latents to small images for people, of a compressor that may train along.

Lives here: what trains, and what is shown and measured. Must not live here: the loss (preview.py), the networks
(models/previewer.py, models/convolutional.py).

Shape legend: B batch, H W image size, h w size of the preview.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from cascade_train.batch import Batch
from cascade_train.models.formats.export_part import save_part
from cascade_train.models.image_quality import check_installed, image_quality
from cascade_train.models.stage import Stage
from cascade_train.models.stage_c import StageC
from cascade_train.tasks.base import Export, Painter, Phase, SampleSettings, StepOutput, Task
from cascade_train.tasks.pictures import RoundTrip, mask_of, pictures_of, weighted
from cascade_train.tasks.preview import Preview
from cascade_train.tasks.trained_compressor import COMPRESSOR, compressor_export, with_compressor

PREVIEWER = "previewer"
"""What it is called among the stage's parts, the phase's modules and the exports."""


@dataclass(frozen=True, kw_only=True)
class PreparedPictures:
    """A micro-batch with every random choice made, on the device.

    Attributes:
        image_BCHW: (B, 3, H, W) fp32 in [0, 1].
        noise_BCHW: (B, C, H / 32, W / 32) fp32 standard normal, for the latents; None = no noise.
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], how much each place counts; None = all of them fully.
        weight_B: (B,) fp32 weight of each sample's loss; None = 1 each.
    """

    image_BCHW: Tensor
    noise_BCHW: Tensor | None
    mask_B1HW: Tensor | None
    weight_B: Tensor | None


class Previewing(Task):
    """Trains every weight of Stage C's previewer on the latents of its compressor; made by `Reconstruction`.

    With the compressor, the two are an autoencoder.
    """

    fits = ("stage_c",)
    reconstructs = ("stage_c",)
    trains_network = False
    needs_image = True

    def __init__(self, objective: Preview, *, train_compressor: bool = False) -> None:
        """Store; `attach` takes the stage."""
        self.objective = objective
        self.train_compressor = train_compressor
        self.stage: StageC
        self.device: torch.device

    def trained_parts(self) -> frozenset[str]:
        """Return the previewer, and the compressor where it trains along."""
        return frozenset({PREVIEWER, COMPRESSOR} if self.train_compressor else {PREVIEWER})

    def idle_parts(self) -> frozenset[str]:
        """Return all but the compressor and the previewer."""
        return frozenset({"network", "text_encoder", "image_encoder"})

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage, and let its previewer train; norms keep their statistics.

        Raises:
            ConfigError: no library to measure with.
        """
        if not isinstance(stage, StageC):
            raise AssertionError(f"a previewer belongs to Stage C, not to {stage.name}")
        check_installed()
        self.stage, self.device = stage, device
        self._module().requires_grad_(requires_grad=True)
        if self.train_compressor:
            self._compressor().requires_grad_(requires_grad=True)

    def phases(self) -> list[Phase]:
        """Return the one phase; the compressor is its second root where it trains."""
        module = self._module()
        units = [[child] for child in module.children()]
        phase = Phase(name="train", modules={PREVIEWER: module}, units={PREVIEWER: units}, loss=self.loss)
        return [with_compressor(phase, self._compressor()) if self.train_compressor else phase]

    def prepare_batch(self, batch: Batch) -> PreparedPictures:
        """Draw the latents' noise, and copy to the device."""
        image_BCHW, noise_BCHW = pictures_of(batch, self.device), None
        if self.objective.latent_noise > 0.0:
            shape = self.stage.latent_shape(*image_BCHW.shape[-2:])
            noise_BCHW = batch.normal("latent_noise", shape).to(self.device, non_blocking=True)
        return PreparedPictures(
            image_BCHW=image_BCHW,
            noise_BCHW=noise_BCHW,
            mask_B1HW=mask_of(batch, self.device),
            weight_B=None if batch.weight_B is None else batch.weight_B.to(self.device, non_blocking=True),
        )

    def loss(self, prepared: PreparedPictures) -> StepOutput:
        """Return the distance of the previews from the pictures at their size, (B,). Does not sync."""
        latent_BCHW = self.stage.encode(prepared.image_BCHW)
        if prepared.noise_BCHW is not None:
            latent_BCHW = latent_BCHW + self.objective.latent_noise * prepared.noise_BCHW
        loss_raw_B = self._distance(prepared, *self._pair(prepared.image_BCHW, latent_BCHW))
        report = {"loss_raw": loss_raw_B.detach()}
        return StepOutput(loss_B=weighted(loss_raw_B, prepared.weight_B), report=report)

    @torch.no_grad()
    def measures(self, prepared: PreparedPictures, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """Return the loss, and PSNR and SSIM of the previews, without a mask; latents get no noise."""
        pair = self._pair(prepared.image_BCHW, self.stage.encode(prepared.image_BCHW))
        return {"loss": self._distance(prepared, *pair), **image_quality(*pair)}

    def _pair(self, image_BCHW: Tensor, latent_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return previews, not clamped, and the pictures at their size, (B, 3, h, w) fp32 each."""
        preview_BChw = self.stage.previewer.decode(latent_BCHW)
        return preview_BChw, interpolate(image_BCHW, preview_BChw.shape[-2:], mode="area")

    def _distance(self, prepared: PreparedPictures, preview_BChw: Tensor, original_BChw: Tensor) -> Tensor:
        mask_B1HW = prepared.mask_B1HW
        small = None if mask_B1HW is None else interpolate(mask_B1HW, preview_BChw.shape[-2:], mode="area")
        return self.objective.pixels(preview_BChw, original_BChw, small)

    def painter(self, settings: SampleSettings, size: Sequence[int]) -> Painter:
        """Return what shows previews beside their pictures; the settings of samplers mean nothing here."""
        return PreviewPainter(self.stage)

    def exports(self) -> Mapping[str, Export]:
        """Return `previewer`, which `model.previewer.weights` takes, and a compressor that trained along."""
        exports = {PREVIEWER: Export(module=self._module(), write=save_part)}
        return exports | compressor_export(self._compressor()) if self.train_compressor else exports

    def _module(self) -> nn.Module:
        return cast(nn.Module, self.stage.previewer.module)

    def _compressor(self) -> nn.Module:
        return cast(nn.Module, self.stage.semantic_compressor.module)


class PreviewPainter(RoundTrip):
    """Shows previews of pictures."""

    result: ClassVar[str] = "preview"
