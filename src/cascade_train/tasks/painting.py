"""Pictures from noise, by a task's predictions.

Must not live here: the predictions (text_to_image.py), the sampler (diffusion/), and when pictures are due (engine/).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cascade_train.diffusion.sampler import ImageNoise, sample
from cascade_train.tasks.base import Draws, Guide, Painter, SampleSettings

if TYPE_CHECKING:
    from cascade_train.tasks.text_to_image import TextToImage


@dataclass(frozen=True, kw_only=True)
class DiffusionPainter(Painter):
    """Denoises latents under captions, and decodes them.

    Attributes:
        task: makes the predictions.
        settings: of the sampler.
        shape: (C, H, W) of a picture's latent.
        result: title of the samples.
    """

    task: TextToImage
    settings: SampleSettings
    shape: tuple[int, int, int]
    result: str = "sample"

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Return the task's own pictures, and the images after one prediction at medium noise."""
        return {**self.task.shown(image_BCHW), "one-step prediction": self._one_step(captions, image_BCHW, draws)}

    def paint(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Return samples (B, 3, H, W) in [0, 1] for B prompts."""
        return self.task.stage.decode(self.latents(captions, image_BCHW, draws, guide))

    def latents(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Return sampled latents (B, C, H, W) fp32 for B prompts; see `paint`."""
        predictor = (
            self.task.predictor(captions, image_BCHW) if guide is None else self.task.guided_predictor(captions, guide)
        )
        noise = self._noise(draws("sample"))
        start = {} if guide is None or guide.start_BCHW is None else self._start(guide.start_BCHW, guide, noise)
        return sample(
            predictor,
            objective=self.task.objective,
            noise=noise,
            shift=self.settings.shift,
            guidance_scale=self.settings.guidance_scale,
            sampler=self.settings.sampler,
            **({"steps": self.settings.steps} | start),
        )

    def _noise(self, generators: list[torch.Generator]) -> ImageNoise:
        return ImageNoise(generators=generators, shape=self.shape, device=self.task.device)

    def _start(self, image_BCHW: Tensor, guide: Guide, noise: ImageNoise) -> dict[str, Any]:
        """Return the start of image-to-image sampling: pictures noised to a time, with that share of the steps left.

        From Stable Cascade, image_to_image.ipynb.
        """
        x0_BCHW = self.task.stage.encode(image_BCHW.to(self.task.device).float() / 255)
        time_B = torch.full((len(x0_BCHW),), guide.start_strength, device=self.task.device)
        logsnr_B = self.task.objective.schedule(time_B, shift=self.settings.shift)
        return {
            "x_init": self.task.objective.diffuse_at(x0_BCHW, noise(), logsnr_B).noised,
            "t_start": guide.start_strength,
            "steps": max(1, round(self.settings.steps * guide.start_strength)),
        }

    def _one_step(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Tensor:
        x0_BCHW = self.task.stage.encode(image_BCHW)
        diffused = self.task.objective.diffuse_at(
            x0_BCHW, self._noise(draws("one_step"))(), x0_BCHW.new_zeros(len(x0_BCHW))
        )
        pred_BCHW, _ = self.task.predictor(captions, image_BCHW)(diffused.noised, diffused.timestep_ratio_B)
        return self.task.stage.decode(self.task.objective.x0(pred_BCHW, diffused.noised, diffused.logsnr_B))
