"""Base of the diffusion tasks on captioned images: random draws, loss, evaluation, prediction, and samples.

Must not live here: which parameters train (one file per task), and noise, loss and sampler themselves (diffusion/).

Shape legend: B batch, G samples of the global batch, C channels, H W image or latent size, L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.batch import Batch
from cascade_train.diffusion.objective import Diffused, Objective
from cascade_train.diffusion.sampler import ImageNoise, sample
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.control import Conditions, ControlResiduals
from cascade_train.models.stage import Images, Stage, Tokens
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.options import Share, check_fields
from cascade_train.tasks.base import (
    Draws,
    Guide,
    ImageSampler,
    Phase,
    Predictor,
    SampleSettings,
    StepOutput,
    Task,
    weighted,
)
from cascade_train.tasks.prepared import PreparedBatch, latent_mask, repeated_twice

__all__ = ["DiffusionImageSampler", "PreparedBatch", "TextToImage"]


@dataclass(kw_only=True, eq=False)
class TextToImage(Task):
    """Base of the tasks that train a stage's network, or something in it, to denoise captioned images.

    Args:
        cond_drop_prob: share of samples whose caption is replaced by the empty one, in [0, 1].
        image_keep_prob: share of samples whose own image is a condition, in [0, 1], the others get zeros; null = the
            stage's (0.1 for Stage C, 0.9 for Stage B, as in the original).

    Attributes:
        trains_conditions: whether something in the encoders of conditions trains, so that they need gradients.
    """

    cond_drop_prob: Share[float]
    image_keep_prob: Share[float | None]

    def __post_init__(self) -> None:
        check_fields(self)
        self.objective: Objective
        self._image_keep_prob: float
        self._empty_tokens: Tokens
        self.trains_conditions = False

    def check_stage(self, stage: Stage) -> None:
        """Refuse a share of images where they are no condition, and text towers that cannot train."""
        super().check_stage(stage)
        for name, encoder in stage.text_encoders().items():
            if encoder.train and not self.trains_network:
                raise ConfigError(
                    f"model.{name}.train=true: is for task=finetune, and a {type(self).__name__} leaves the weights of "
                    "the model as they are. Set it to false"
                )
            for key, value in {"lr": encoder.lr, "stop_after": encoder.stop_after}.items():
                if value is not None and name not in self.trained_parts():
                    raise ConfigError(f"model.{name}.{key}={value}: nothing in this tower trains; leave it null")
        if self.image_keep_prob and stage.image_keep_prob == 0.0:
            raise ConfigError(
                f"task.image_keep_prob={self.image_keep_prob}: an image is no condition of {stage.name}; leave it null"
            )

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage; a task extends this by what it freezes and adds."""
        super().attach(stage, objective, device)
        self.objective = objective
        stage.scheduler = objective.scheduler_config()
        self._image_keep_prob = stage.image_keep_prob if self.image_keep_prob is None else self.image_keep_prob
        self._empty_tokens = self._tokens([""])

    def trained_towers(self) -> dict[str, TextEncoder]:
        """Text towers in which something trains, by name; none by default."""
        return {}

    def _roots(self) -> dict[str, nn.Module]:
        return {"network": self.stage.network, **{name: tower.module for name, tower in self.trained_towers().items()}}

    def phases(self) -> list[Phase]:
        """The one phase; its roots hold every trainable parameter, so that ranks share all gradients."""
        towers = self.trained_towers()
        units = {"network": self.stage.units(), **{name: tower.units() for name, tower in towers.items()}}
        lrs = {name: tower.lr for name, tower in towers.items() if tower.lr is not None}
        until = {name: tower.stop_after for name, tower in towers.items() if tower.stop_after is not None}
        return [Phase(name="train", modules=self._roots(), units=units, loss=self.loss, lrs=lrs, until=until)]

    def prepare_batch(self, batch: Batch) -> PreparedBatch:
        """Draw noise level, noise and dropped conditions, tokenize, and copy to the device."""
        objective, shape, further = self.objective, self._latent_shape(batch), dict[str, Any]()
        if objective.offset_noise:
            further["offset_BC11"] = self._copy(batch.normal("offset_noise", (shape[0], 1, 1)))
        if objective.input_perturbation:
            further["perturbation_BCHW"] = self._copy(batch.normal("input_perturbation", shape))
        if "mask" in batch.tensors:
            further["mask_B1HW"] = latent_mask(self._copy(batch.tensors["mask"]), shape)
        return PreparedBatch(
            image_BCHW=None if batch.image_BCHW is None else self._copy(batch.image_BCHW),
            tokens=self._tokens(batch.captions),
            drop_caption_B=self._copy(batch.uniform("caption_drop") < self.cond_drop_prob),
            keep_image_B=batch.uniform("image_keep") < self._image_keep_prob,
            timestep_B=self._copy(batch.uniform("timestep")),
            noise_BCHW=self._copy(objective.draw_noise(batch.generators("noise"), shape)),
            weight_B=None if batch.weight_B is None else self._copy(batch.weight_B),
            drawn=self.stage.draw(batch),
            cached={n: self._copy(batch.tensors[n]) for n in self.stage.image_products if n in batch.tensors},
            **further,
        )

    def _latent_shape(self, batch: Batch) -> tuple[int, int, int]:
        if batch.image_BCHW is None and not self.stage.reads_cache:
            raise ConfigError("data: a cache cannot be a part of other data, where it is not compared with the model")
        if batch.image_BCHW is None:
            channels, height, width = batch.tensors[self.stage.latent_name].shape[1:]
            return channels, height, width
        return self.stage.latent_shape(*batch.image_BCHW.shape[-2:])

    def loss(self, prepared: PreparedBatch) -> StepOutput:
        """Weighted loss (B,), and `loss_raw` and `logsnr` (B,) as report. Does not sync."""
        trains = torch.is_grad_enabled()
        with torch.no_grad():
            images = prepared.images
            with torch.set_grad_enabled(trains and self.trains_conditions):
                cond = self._conditions(prepared, prepared.tokens, images)
            x0_BCHW = self.stage.training_latents(images, prepared.drawn)
            noise = (prepared.noise_BCHW, prepared.timestep_B, prepared.offset_BC11)
            further = {} if prepared.perturbation_BCHW is None else {"perturbation_BCHW": prepared.perturbation_BCHW}
            diffused = self.objective.diffuse(x0_BCHW, *noise, **further)
        residuals = self.control_residuals(prepared, training=True)
        pred_BCHW = self._predict(diffused.noised, diffused.timestep_ratio_B, cond, residuals)
        loss_B, loss_raw_B = self._losses(pred_BCHW, diffused, prepared)
        if trains:
            self.objective.after_micro_batch(diffused.logsnr_B, loss_raw_B)
        report = {"loss_raw": loss_raw_B.detach(), "logsnr": diffused.logsnr_B}
        for name, further_B in self.further_losses(prepared, diffused).items():
            report[name], loss_B = further_B.detach(), loss_B + further_B
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report=report)

    def further_losses(self, prepared: PreparedBatch, diffused: Diffused) -> Mapping[str, Tensor]:
        """Losses (B,) of training that are added to the objective's, by name; none by default."""
        return {}

    def _conditions(self, prepared: PreparedBatch, tokens: Tokens, images: Images) -> Conditions:
        """Conditions of training under captions, (B, L) tokens each, some dropped."""
        shown = images if self._image_keep_prob > 0.0 else None
        tokens = self._drop(tokens, prepared.drop_caption_B)
        return self.stage.conditions(tokens, shown, prepared.keep_image_B, prepared.drawn)

    def measures(self, prepared: PreparedBatch, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        """Unweighted loss (B,) at each noise level."""
        return {f"loss_logsnr_{level:g}": self.evaluate(prepared, level) for level in logsnr}

    @torch.no_grad()
    def evaluate(self, prepared: PreparedBatch, logsnr: float) -> Tensor:
        """Unweighted loss (B,) fp32 of a prepared micro-batch at one noise level.

        The noise is the batch's own and no caption is dropped; an image is a condition only where the stage needs one.
        """
        images = prepared.images
        x0_BCHW = self.stage.encode(images)
        logsnr_B = torch.full_like(prepared.timestep_B, logsnr)
        diffused: Diffused = self.objective.diffuse_at(x0_BCHW, prepared.noise_BCHW, logsnr_B, prepared.offset_BC11)
        cond = self.stage.conditions(prepared.tokens, images if self.stage.needs_image else None)
        residuals = self.control_residuals(prepared, training=False)
        pred_BCHW = self._predict(diffused.noised, diffused.timestep_ratio_B, cond, residuals)
        return self._losses(pred_BCHW, diffused, prepared)[1]

    def _losses(self, pred_BCHW: Tensor, diffused: Diffused, prepared: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Weighted and unweighted losses, (B,) each; a RunError where the objective's have another shape."""
        losses = self.objective.loss(pred_BCHW, diffused, prepared.mask_B1HW)
        if any(loss_B.shape != pred_BCHW.shape[:1] for loss_B in losses):
            raise RunError(
                f"{type(self.objective).__name__}.loss must return a weighted and an unweighted loss of each sample, "
                f"({len(pred_BCHW)},) here, and returned the shapes {[tuple(loss_B.shape) for loss_B in losses]}."
            )
        return losses

    def control_residuals(self, prepared: PreparedBatch, *, training: bool) -> ControlResiduals | None:
        """Residuals that a batch's control maps add in the network, some dropped in training; None = none."""
        return None

    def _predict(
        self, noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions, residuals: ControlResiduals | None
    ) -> Tensor:
        control = None if residuals is None else residuals(noised_BCHW, timestep_ratio_B, cond)
        return self.stage.predict(noised_BCHW, timestep_ratio_B, cond, control)

    def image_sampler(self, settings: SampleSettings, size: Sequence[int]) -> DiffusionImageSampler:
        """ImageSampler that denoises latents of pictures of (height, width) pixels and decodes them."""
        return DiffusionImageSampler(task=self, settings=settings, shape=self.stage.latent_shape(*size))

    def predictor(self, captions: Sequence[str], image_BCHW: Tensor | None, negative: str = "") -> Predictor:
        """Predictions under B prompts and, where the stage needs them, their images, and without both.

        The latter are under `negative`, which guidance leads away from.
        """
        if self.stage.needs_image and image_BCHW is None:
            raise ConfigError(
                f"{self.stage.name} reconstructs images and cannot sample from prompts alone: leave "
                "sample.prompts=null, which shows captioned images of the data"
            )
        return self.predictor_under(captions, image_BCHW if self.stage.needs_image else None, negative=negative)

    @torch.no_grad()
    def predictor_under(
        self,
        captions: Sequence[str],
        images: Images | None,
        residuals: ControlResiduals | None = None,
        *,
        negative: str,
    ) -> Predictor:
        """Predictions under B captions and images, and under `negative` alone, from one forward pass.

        Images are (B, 3, H, W) float in [0, 1], or their products; None = none. `residuals` is in both predictions.
        """
        tokens = self._tokens([*captions, *[negative] * len(captions)])
        keep_B = torch.arange(2 * len(captions)) < len(captions)
        cond = self.stage.conditions(tokens, None if images is None else repeated_twice(images), keep_B)

        @torch.no_grad()
        def predict(noised_BCHW: Tensor, timestep_ratio_B: Tensor) -> tuple[Tensor, Tensor]:
            pred_BCHW = self._predict(noised_BCHW.repeat(2, 1, 1, 1), timestep_ratio_B.repeat(2), cond, residuals)
            with_caption_BCHW, without_BCHW = pred_BCHW.float().chunk(2)
            return with_caption_BCHW, without_BCHW

        return predict

    def guided_predictor(self, captions: Sequence[str], guide: Guide, negative: str = "") -> Predictor:
        """Predictions under B captions and a user's images; a ConfigError for images without use."""
        if guide.semantic_BCHW is not None:
            return self.predictor_under(captions, {"effnet": guide.semantic_BCHW.to(self.device)}, negative=negative)
        if guide.image_BCHW is None and not self.stage.needs_image:
            return self.predictor_under(captions, self._variation(guide), negative=negative)
        if guide.image_BCHW is None:
            raise ConfigError(
                f"{self.stage.name} reconstructs images and cannot sample from prompts alone: give image=<picture>,"
                " or from=<run of Stage C> decoder=<this one>"
            )
        if self.stage.needs_image and not guide.is_map and guide.strength == 1.0:
            return self.predictor(captions, self._copy(guide.image_BCHW).float() / 255, negative)
        raise ConfigError(
            f"image, control and strength are for control networks; a {type(self).__name__} "
            f"samples from prompts {'and image=… alone' if self.stage.needs_image else 'alone'}"
        )

    def _variation(self, guide: Guide) -> Tensor | None:
        return None if guide.variation_BCHW is None else self._copy(guide.variation_BCHW).float() / 255

    def shown(self, image_BCHW: Tensor) -> Mapping[str, Tensor]:
        """Pictures beside samples of images (B, 3, H, W), in [0, 1] by title; none by default."""
        return {}

    def after_step(self, report: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Adapt the objective to (G,) losses and noise levels of the global batch; a ConfigError without them."""
        if missing := {"logsnr", "loss_raw"} - report.keys():
            raise ConfigError(
                f"task: {type(self).__name__}.loss reports no {' and no '.join(sorted(missing))}, to which the "
                "objective adapts: put (B,) of each into StepOutput.report"
            )
        self.objective.after_step(report["logsnr"], report["loss_raw"])
        return {}

    def notices(self, *, last: bool = False) -> list[str]:
        """Report how many captions were truncated, see `TextEncoder.notices`."""
        return self.stage.notices(last=last)

    def state_dict(self) -> dict[str, Tensor]:
        """Objective's state; the task itself has none."""
        return self.objective.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the objective's state."""
        self.objective.load_state_dict(state)

    def _drop(self, tokens: Tokens, drop_caption_B: Tensor) -> Tokens:
        return {
            name: torch.where(drop_caption_B.view(-1, *[1] * (value.dim() - 1)), self._empty_tokens[name], value)
            for name, value in tokens.items()
        }

    def _tokens(self, captions: Sequence[str]) -> Tokens:
        return {name: self._copy(value_BL) for name, value_BL in self.stage.tokenize(captions).items()}


@dataclass(frozen=True, kw_only=True)
class DiffusionImageSampler(ImageSampler):
    """Denoises latents, (C, H, W) of `shape`, under captions, and decodes them."""

    task: TextToImage
    settings: SampleSettings
    shape: tuple[int, int, int]
    result: str = "sample"

    def beside(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Mapping[str, Tensor]:
        """Task's own pictures, and the images after one prediction at medium noise."""
        return {**self.task.shown(image_BCHW), "one-step prediction": self._one_step(captions, image_BCHW, draws)}

    def sample(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Samples (B, 3, H, W) in [0, 1] for B prompts."""
        return self.task.stage.decode(self.latents(captions, image_BCHW, draws, guide))

    def latents(
        self, captions: Sequence[str], image_BCHW: Tensor | None, draws: Draws, guide: Guide | None = None
    ) -> Tensor:
        """Sampled latents (B, C, H, W) fp32 for B prompts; see `sample`."""
        task, settings = self.task, self.settings
        if guide is None:
            predictor = task.predictor(captions, image_BCHW, settings.negative_prompt)
        else:
            predictor = task.guided_predictor(captions, guide, settings.negative_prompt)
        noise = self._noise(draws("sample"))
        start = {} if guide is None or guide.start_BCHW is None else self._start(guide.start_BCHW, guide, noise)
        return sample(
            predictor,
            objective=task.objective,
            noise=noise,
            shift=settings.shift,
            guidance_scale=settings.guidance_scale,
            guidance_rescale=task.stage.guidance_rescale,
            sampler=settings.sampler,
            **({"steps": settings.steps} | start),
        )

    def _noise(self, generators: list[torch.Generator]) -> ImageNoise:
        return ImageNoise(generators=generators, shape=self.shape, device=self.task.device)

    def _start(self, image_BCHW: Tensor, guide: Guide, noise: ImageNoise) -> dict[str, Any]:
        """Pictures noised to a time, and that share of the steps (Stable Cascade, image_to_image.ipynb)."""
        objective, device = self.task.objective, self.task.device
        x0_BCHW = self.task.stage.encode(image_BCHW.to(device).float() / 255)
        logsnr_B = objective.schedule(
            x0_BCHW.new_full((len(x0_BCHW),), guide.start_strength), shift=self.settings.shift
        )
        return {
            "x_init": objective.diffuse_at(x0_BCHW, noise(), logsnr_B).noised,
            "t_start": guide.start_strength,
            "steps": max(1, round(self.settings.steps * guide.start_strength)),
        }

    def _one_step(self, captions: Sequence[str], image_BCHW: Tensor, draws: Draws) -> Tensor:
        task, objective = self.task, self.task.objective
        x0_BCHW = task.stage.encode(image_BCHW)
        noise_BCHW, medium_B = self._noise(draws("one_step"))(), x0_BCHW.new_zeros(len(x0_BCHW))
        diffused = objective.diffuse_at(x0_BCHW, noise_BCHW, medium_B)
        pred_BCHW, _ = task.predictor(captions, image_BCHW)(diffused.noised, diffused.timestep_ratio_B)
        return task.stage.decode(objective.x0(pred_BCHW, diffused.noised, diffused.logsnr_B))
