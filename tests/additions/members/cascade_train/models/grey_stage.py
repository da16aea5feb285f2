"""Stage C for pictures without colour."""

from __future__ import annotations

from torch import Tensor

from cascade_train.models.cascade.stage_c import StageC
from cascade_train.models.stage import Images


class GreyStage(StageC):
    """Stage C whose latents are those of the grey pictures."""

    def encode(self, images: Images) -> Tensor:
        return super().encode(grey(images) if isinstance(images, Tensor) else images)

    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        return super().make_image_products(grey(image_BCHW))


def grey(image_BCHW: Tensor) -> Tensor:
    return image_BCHW.mean(dim=1, keepdim=True).expand_as(image_BCHW)
