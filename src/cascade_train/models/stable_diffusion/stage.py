"""Stable Diffusion 1.x, 2.x and XL: latents of an autoencoder from text, by diffusers' UNet and one or two text towers.

Must not live here: noise levels and what is predicted of them (diffusion/), and pipelines (formats/).

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.errors import ConfigError
from cascade_train.models.autoencoder_kl import KLAutoencoder
from cascade_train.models.control import Conditions, Control, ControlOptions
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from cascade_train.models.stable_diffusion.formats.stored_pipeline import stored_pipeline
from cascade_train.models.stable_diffusion.unet_config import ConditionUNetConfig
from cascade_train.models.stage import Images, Save, Tokens, to_device
from cascade_train.models.text_encoder import SecondTextEncoder

Drawn = dict[str, Tensor]
"""Choices about a training batch, on the host: `posterior`, (B, C, H, W) fp32 standard normal; `time_ids`, (B, 6)."""

OF_STAGE_C = {"blocks": None, "bottleneck": "effnet", "backbone_weights": None}
"""Options of control networks that mean nothing here, and the values that stand for that."""


@dataclass(kw_only=True, eq=False, repr=False)
class StableDiffusion(DenoisingStage):
    """Stable Diffusion 1.x and 2.x, at any size (Rombach et al. 2022); begins as diffusers' network without weights.

    Args:
        network: architecture of the network.
        vae: images to the latents that are modelled, and back.
    """

    family = STABLE_DIFFUSION
    name = "stable_diffusion"
    abilities = frozenset({"denoising", "text_to_image", "control"})
    part = "unet"
    frozen_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "vae")
    towers = ("text_encoder", "text_encoder_2", "vae")
    widths: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("in_channels", "vae", "latent_channels"),
        ("out_channels", "vae", "latent_channels"),
        ("cross_attention_dim", "text_encoder", "hidden_size"),
    )
    multiple_of = encoded_by = decoded_by = "vae"
    image_keep_prob = 0.0
    guidance_scale = 7.5
    guidance_rescale = 0.0
    noise_unit = "timestep"
    needs_image = False
    latent_name = "latent"
    trains_text = True

    network: ConditionUNetConfig
    vae: KLAutoencoder

    def __post_init__(self) -> None:
        self.image_products = {"latent": "vae"} | ({"latent_std": "vae"} if self.vae.sample_posterior else {})
        self.caption_products = {"text": "text_encoder"}
        self._control: Control | None = None
        super().__post_init__()
        for name, part in self._parts.items():
            if part.weights is None and not self.random_encoders and not getattr(part, "train", False):
                raise ValueError(
                    f"model.{name}.weights=null: it follows model.weights unless it is set, and a network from scratch "
                    "needs frozen parts that are trained. Name the pipeline that it comes from, or set "
                    "model.random_encoders=true to try a machine"
                )

    def _networks(self) -> list[Any]:
        return [self.network, *([] if self._control is None else [self._control.module])]

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network and its control network, see `block_network.set_attention`."""
        for network in self._networks():
            network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the activations of residual and transformer blocks in backward instead of keeping them."""
        for network in self._networks():
            network.set_recomputing(enabled)

    def draw(self, batch: Batch) -> Drawn:
        """Draw where in their distribution the latents lie, unless they are its means."""
        if not self.vae.sample_posterior:
            return {}
        return {"posterior": batch.normal("posterior", self._latent_shape(batch))}

    def _latent_shape(self, batch: Batch) -> Sequence[int]:
        if batch.image_BCHW is None:
            return batch.tensors[self.latent_name].shape[1:]
        return self.latent_shape(*batch.image_BCHW.shape[-2:])

    def training_latents(self, images: Images, drawn: Drawn) -> Tensor:
        """Encode images, (B, 3, H, W) float in [0, 1] or cached, to a draw of their latents, (B, C, H, W) fp32."""
        if "posterior" not in drawn:
            return self.encode(images)
        named = not isinstance(images, Tensor)
        mean, std = (images["latent"], images["latent_std"]) if named else self.vae.posterior(images)
        return mean + std * to_device(drawn["posterior"], mean.device)

    @torch.no_grad()
    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return mean and, where latents are drawn, standard deviation of the latents, (B, C, H, W) fp32 each."""
        made = dict(zip(("latent", "latent_std"), self.vae.posterior(image_BCHW), strict=True))
        return {name: made[name] for name in self.image_products}

    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        return {"text": self.text_encoder.encode(tokens)[0]}

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Drawn | None = None,
    ) -> Conditions:
        """Encode captions to `encoder_hidden_states` (B, L, D). An image is no condition."""
        return {"encoder_hidden_states": self._encode_text(tokens)["text"]}

    def predict(
        self, noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions, control: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Run the network on noised latents (B, C, H, W) at (B,) fp32 timesteps; same shape out."""
        return self.network(noised_BCHW, timestep_ratio_B, **self.inputs(noised_BCHW, cond), control=control)

    def inputs(self, noised_BCHW: Tensor, cond: Conditions) -> Conditions:
        """Return all that the network and its control network are conditioned on, for noised latents (B, C, H, W)."""
        return cond

    def check_control(self, options: ControlOptions) -> None:
        """Refuse what is for Stage C's control networks."""
        for key, unset in OF_STAGE_C.items():
            if (value := getattr(options, key)) != unset:
                raise ConfigError(
                    f"task.{key}={value}: is for control networks of Stage C; those of {self.name} are copies of the "
                    f"network's way down. Set it to {'null' if unset is None else unset}."
                )

    def add_control(self, options: ControlOptions, device: torch.device) -> Control:
        """Return a control network, see `UNetControl`; attention and recomputing are chosen for it too."""
        from cascade_train.models.stable_diffusion.control import UNetControl  # heavy: diffusers

        self._control = UNetControl(self, options, device)
        return self._control

    @classmethod
    def stored_pipeline(cls, folder: Path, model: str) -> tuple[list[str], dict[str, Any]]:
        """Return how a training of a pipeline's folder is composed, see `Stage.stored_pipeline`."""
        return stored_pipeline(folder, model)

    def exports(self) -> Mapping[str, Save]:
        """Return `pipeline`, a folder that diffusers' pipeline of this family loads."""
        from cascade_train.models.stable_diffusion.formats.export_pipeline import save_pipeline  # heavy: pipelines

        return {"pipeline": partial(save_pipeline, self)}


@dataclass(kw_only=True, eq=False, repr=False)
class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL's base model (Podell et al. 2023): two text towers, and sizes as conditions.

    Args:
        size_conditions: what training says of each picture. original = its size, and where it was cropped, in pixels of
            the enlarged or shrunken picture (section 2.2); target = that it is as large as its part, and whole. Samples
            are always made as of the latter.
        text_encoder_2: second text tower, with a projection for the pooled text.
    """

    name = "stable_diffusion_xl"
    frozen_parts = ("text_encoder", "text_encoder_2", "vae")
    widths = StableDiffusion.widths[:2]
    guidance_scale = 5.0

    size_conditions: Literal["original", "target"]
    text_encoder_2: SecondTextEncoder

    def __post_init__(self) -> None:
        super().__post_init__()
        self.caption_products = {"text": "text_encoder", "text_2": "text_encoder_2", "pooled": "text_encoder_2"}
        if self.size_conditions == "original":
            self.needed_facts = {"time_ids": "sizes and crops, which model.size_conditions=target does without"}

    def _check(self) -> None:
        super()._check()
        config, towers = self.network_config, (self.text_encoder, self.text_encoder_2)
        width = sum(tower.hidden_size for tower in towers)
        if config.cross_attention_dim != width:
            raise ValueError(
                f"model.network.cross_attention_dim={config.cross_attention_dim}: must equal {width}, the hidden sizes "
                "of both text towers together"
            )
        for key in ("max_tokens", "long_captions"):
            first, second = (getattr(tower, key) for tower in towers)
            if first != second:
                raise ValueError(
                    f"model.text_encoder_2.{key}={second}: must be that of model.text_encoder, {first}, since the "
                    "texts of both towers lie side by side"
                )
        pooled, each = self.text_encoder_2.projection_dim, config.addition_time_embed_dim
        found = config.projection_class_embeddings_input_dim
        if pooled is None or each is None or config.addition_embed_type is None or found != pooled + 6 * each:
            raise ValueError(
                f"model.network.projection_class_embeddings_input_dim={found}: must equal "
                f"model.text_encoder_2.projection_dim={pooled} and six times "
                f"model.network.addition_time_embed_dim={each}, with addition_embed_type=text_time"
            )

    def _tokens_of(self, captions: Sequence[str]) -> Tokens:
        second = self.text_encoder_2.tokenize(captions)
        return {**self.text_encoder.tokenize(captions), **{f"{name}_2": ids for name, ids in second.items()}}

    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        second = {name: tokens[f"{name}_2"] for name in ("input_ids", "attention_mask")}
        text, pooled = self.text_encoder_2.encode(second)
        if pooled is None:
            raise AssertionError("a second tower without projection is refused before")
        return {"text": self.text_encoder.encode(tokens)[0], "text_2": text, "pooled": pooled[:, 0]}

    def draw(self, batch: Batch) -> Drawn:
        """Draw as `StableDiffusion.draw`, and look up the sizes of the batch's pictures."""
        return {**super().draw(batch), **self.picture_facts(batch)}

    def picture_facts(self, batch: Batch) -> dict[str, Tensor]:
        """Return `time_ids`, see `size_ids`, of pictures with known sizes or from a cache."""
        if not self.needed_facts:
            return {}
        if batch.image_BCHW is None:
            return {"time_ids": batch.tensors["time_ids"]}
        return {} if batch.original_size_B2 is None or batch.crop_B4 is None else {"time_ids": size_ids(batch)}

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Drawn | None = None,
    ) -> Conditions:
        """Encode captions to `encoder_hidden_states` (B, L, D) of both towers side by side, and pooled `text_embeds`.

        The latter are (B, D'). `time_ids` (B, 6) are among them where `drawn` has them.
        """
        made = self._encode_text(tokens)
        text = torch.cat([made["text"], made["text_2"]], dim=-1)
        cond = {"encoder_hidden_states": text, "text_embeds": made["pooled"]}
        if drawn is not None and "time_ids" in drawn:
            cond["time_ids"] = to_device(drawn["time_ids"], made["text"].device)
        return cond

    def inputs(self, noised_BCHW: Tensor, cond: Conditions) -> Conditions:
        """Return conditions with `time_ids`; by default, as in diffusers, of whole pictures of the latents' size."""
        if "time_ids" in cond:
            return cond
        sides = [side * self.vae.stride for side in noised_BCHW.shape[-2:]]
        ids_6 = torch.tensor([*sides, 0, 0, *sides], dtype=torch.float32)
        return {**cond, "time_ids": to_device(ids_6, noised_BCHW.device).expand(len(noised_BCHW), 6)}


def size_ids(batch: Batch) -> Tensor:
    """Return SDXL's conditions of a batch of pictures with known sizes, (B, 6) fp32 on the host, in pixels.

    Height and width of the original; top and left of the crop, after the picture was resized so that its crop has the
    batch's size; height and width of the batch. Left is counted in the picture as it is shown: of a mirrored one from
    what was its right, as diffusers' train_text_to_image_sdxl.py mirrors before it crops.
    """
    assert batch.image_BCHW is not None and batch.original_size_B2 is not None and batch.crop_B4 is not None  # noqa: PT018
    target_2 = torch.tensor(batch.image_BCHW.shape[-2:])
    corner_B2, box_B2 = batch.crop_B4.split(2, dim=1)
    if batch.flipped_B is not None:
        right_B = batch.original_size_B2[:, 1] - batch.crop_B4[:, 1] - batch.crop_B4[:, 3]
        left_B = torch.where(batch.flipped_B, right_B, corner_B2[:, 1])
        corner_B2 = torch.stack([corner_B2[:, 0], left_B], dim=1)
    moved_B2 = (corner_B2 * target_2 / box_B2).round()
    return torch.cat([batch.original_size_B2, moved_B2, target_2.expand_as(corner_B2)], dim=1).float()
