"""The objective of a previewer: how near the picture that it makes of semantic latents comes to the picture itself.

Shape legend: B batch, H W size of the preview.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from cascade_train.diffusion.checks import check_choice
from cascade_train.tasks.pictures import PIXELS, pixel_distance


class Preview:
    """How a preview is scored: by its pixels.

    Args:
        pixel: l1 or l2, the distance between pictures.
        latent_noise: standard deviation of noise on the latents in training, so that the previewer forgives Stage C
            its errors, and a compressor that trains along keeps what it can say loudly; 0 = none.

    Raises:
        ConfigError: another distance, or less than no noise.

    Attributes:
        denoises: whether it is for what denoises latents.
        fits: names of the stages that it is for.
    """

    denoises: ClassVar[bool] = False
    fits: ClassVar[tuple[str, ...]] = ("stage_c",)

    def __init__(self, *, pixel: Literal["l1", "l2"], latent_noise: float = 0.0) -> None:
        check_choice("pixel", pixel, PIXELS)
        if latent_noise < 0.0:
            raise ValueError(f"latent_noise={latent_noise}: is a standard deviation, give 0 or more")
        self.pixel, self.latent_noise = pixel, latent_noise

    def pixels(self, preview_BCHW: Tensor, original_BCHW: Tensor, mask_B1HW: Tensor | None = None) -> Tensor:
        """Return the mean distance of pixels, (B,) fp32; a mask in [0, 1] says how much each place counts."""
        return pixel_distance(preview_BCHW, original_BCHW, self.pixel, mask_B1HW)
