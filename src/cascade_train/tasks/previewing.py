"""Training of the previewer: semantic latents to small images for people, beside a frozen compressor.

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
from cascade_train.errors import ConfigError
from cascade_train.models.export_part import save_part
from cascade_train.models.image_quality import check_installed, image_quality
from cascade_train.models.stage import Stage
from cascade_train.models.stage_c import StageC
from cascade_train.tasks.base import Export, Painter, Phase, SampleSettings, StepOutput, Task
from cascade_train.tasks.pictures import RoundTrip, pictures_of, weighted
from cascade_train.tasks.preview import Preview

PREVIEWER = "previewer"
"""What it is called among the stage's parts, the phase's modules and the exports."""


@dataclass(frozen=True, kw_only=True)
class PreparedPictures:
    """A micro-batch on the device; there is no random choice to make.

    Attributes:
        image_BCHW: (B, 3, H, W) fp32 in [0, 1].
        mask_B1HW: (B, 1, H, W) fp32 in [0, 1], how much each place counts; None = all of them fully.
        weight_B: (B,) fp32 weight of each sample's loss; None = 1 each.
    """

    image_BCHW: Tensor
    mask_B1HW: Tensor | None
    weight_B: Tensor | None


class Previewing(Task):
    """Trains every weight of Stage C's previewer on the latents of its compressor; made by `Reconstruction`."""

    fits = ("stage_c",)
    reconstructs = ("stage_c",)
    trains_network = False
    needs_image = True

    def __init__(self, objective: Preview) -> None:
        """Store; `attach` takes the stage."""
        self.objective = objective
        self.stage: StageC
        self.device: torch.device

    def trained_parts(self) -> frozenset[str]:
        """Return the previewer."""
        return frozenset({PREVIEWER})

    def idle_parts(self) -> frozenset[str]:
        """Return all but the compressor and the previewer."""
        return frozenset({"network", "text_encoder", "image_encoder"})

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage, and let its previewer train; norms keep their statistics.

        Raises:
            ConfigError: a previewer without weights, or no library to measure with.
        """
        if not isinstance(stage, StageC):
            raise AssertionError(f"a previewer belongs to Stage C, not to {stage.name}")
        check_installed()
        self.stage, self.device = stage, device
        if not list(self._module().parameters()):
            raise ConfigError(
                f"model.previewer: {type(stage.previewer).__name__} has no weights, so that nothing would train. "
                "Choose one that has, such as model.previewer._target_=cascade_train.models.convolutional."
                "ConvolutionalPreviewer +model.previewer.weights=null"
            )
        self._module().requires_grad_(requires_grad=True)

    def phases(self) -> list[Phase]:
        """Return the one phase."""
        module = self._module()
        units = [[child] for child in module.children()]
        return [Phase(name="train", modules={PREVIEWER: module}, units={PREVIEWER: units}, loss=self.loss)]

    def prepare_batch(self, batch: Batch) -> PreparedPictures:
        """Copy to the device."""
        mask_B1HW, weight_B = batch.tensors.get("mask"), batch.weight_B
        return PreparedPictures(
            image_BCHW=pictures_of(batch, self.device),
            mask_B1HW=None if mask_B1HW is None else mask_B1HW.to(self.device, non_blocking=True).float() / 255,
            weight_B=None if weight_B is None else weight_B.to(self.device, non_blocking=True),
        )

    def loss(self, prepared: PreparedPictures) -> StepOutput:
        """Return the distance of the previews from the pictures at their size, (B,). Does not sync."""
        loss_raw_B = self._distance(prepared, *self._pair(prepared.image_BCHW))
        report = {"loss_raw": loss_raw_B.detach()}
        return StepOutput(loss_B=weighted(loss_raw_B, prepared.weight_B), report=report)

    @torch.no_grad()
    def measures(self, prepared: PreparedPictures, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """Return the loss, and PSNR and SSIM of the previews, without a mask."""
        pair = self._pair(prepared.image_BCHW)
        return {"loss": self._distance(prepared, *pair), **image_quality(*pair)}

    def _pair(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return previews, not clamped, and the pictures at their size, (B, 3, h, w) fp32 each."""
        preview_BChw = self.stage.previewer.decode(self.stage.encode(image_BCHW))
        return preview_BChw, interpolate(image_BCHW, preview_BChw.shape[-2:], mode="area")

    def _distance(self, prepared: PreparedPictures, preview_BChw: Tensor, original_BChw: Tensor) -> Tensor:
        mask_B1HW = prepared.mask_B1HW
        small = None if mask_B1HW is None else interpolate(mask_B1HW, preview_BChw.shape[-2:], mode="area")
        return self.objective.pixels(preview_BChw, original_BChw, small)

    def painter(self, settings: SampleSettings, size: Sequence[int]) -> Painter:
        """Return what shows previews beside their pictures; the settings of samplers mean nothing here."""
        return PreviewPainter(self.stage)

    def exports(self) -> Mapping[str, Export]:
        """Return `previewer`, which `model.previewer.weights` takes."""
        return {PREVIEWER: Export(module=self._module(), write=save_part)}

    def _module(self) -> nn.Module:
        return cast(nn.Module, self.stage.previewer.module)


class PreviewPainter(RoundTrip):
    """Shows previews of pictures."""

    result: ClassVar[str] = "preview"
