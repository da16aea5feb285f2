"""Stage C: semantic latents from text and, optionally, an image.

Lives here: which modules make up the stage, and how images and captions become latents and conditions. Must not live
here: the modules themselves, and anything about what trains.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.image_encoder import ImageEncoder
from cascade_train.models.previewer import Previewer
from cascade_train.models.semantic_compressor import SemanticCompressor
from cascade_train.models.stage import Conditions, Images, Tokens, product
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.options import File


class StageC(DenoisingStage):
    """Stage C of Stable Cascade, at any size.

    Args:
        image_size: side in pixels of the training images; a multiple of the compressor's stride.
        precision: number format of compute that the size is meant for, used where `train.precision` is auto.
        seed: of the network's first values when `weights` is null.
        random_encoders: true = the frozen parts take values from a fixed seed and the packaged tokenizer, whatever
            their own `weights` say (nothing is downloaded).
        weights: of the network: hub id (`owner/name:subfolder`), local diffusers folder, or single file; null = from
            scratch with the original's initialisation.
        network: architecture of the network.
        text_encoder: frozen text tower.
        image_encoder: frozen image tower; null = the image condition is always zeros.
        semantic_compressor: images to latents.
        previewer: latents to small images.

    Raises:
        ValueError: an image size that does not divide, or parts whose widths do not fit the network.
    """

    name = "stage_c"
    part = "prior"
    image_keep_prob = 0.1
    guidance_scale = 4.0
    needs_image = False
    latent_name = "effnet_latent"
    encodes_nothing = frozenset({"network", "previewer"})

    def __init__(
        self,
        *,
        image_size: int,
        precision: Literal["bf16", "fp32"],
        seed: int,
        random_encoders: bool,
        weights: File[str | None],
        network: CascadeUNetConfig,
        text_encoder: TextEncoder,
        image_encoder: ImageEncoder | None,
        semantic_compressor: SemanticCompressor,
        previewer: Previewer,
    ) -> None:
        self.image_size = image_size
        self.precision = precision
        self.image_multiple = semantic_compressor.stride
        self.weights = weights
        self.seed = seed
        self.network_config = network
        self.text_encoder = text_encoder
        self.image_encoder = image_encoder
        self.semantic_compressor = semantic_compressor
        self.previewer = previewer
        self.image_products = {"effnet_latent": "semantic_compressor"}
        if image_encoder is not None:
            self.image_products["clip_img"] = "image_encoder"
        self.caption_products = dict.fromkeys(("clip_text", "clip_text_pooled"), "text_encoder")
        self._check_parts()
        if random_encoders:
            for part in self._parts().values():
                part.forget_weights()

    def _check_parts(self) -> None:
        if self.network_config.clip_text_in_channels is None or self.network_config.clip_image_in_channels is None:
            raise ValueError("model.network.clip_text_in_channels and clip_image_in_channels: Stage C needs both")
        widths = [
            ("in_channels", "semantic_compressor.latent_channels", self.semantic_compressor.latent_channels),
            ("clip_text_in_channels", "text_encoder.hidden_size", self.text_encoder.hidden_size),
            ("clip_text_pooled_in_channels", "text_encoder.projection_dim", self.text_encoder.projection_dim),
        ]
        if self.image_encoder is not None:
            widths.append(("clip_image_in_channels", "image_encoder.projection_dim", self.image_encoder.projection_dim))
        self._check(widths)

    def _parts(self) -> dict[str, TextEncoder | ImageEncoder | SemanticCompressor | Previewer]:
        parts = {
            "text_encoder": self.text_encoder,
            "image_encoder": self.image_encoder,
            "semantic_compressor": self.semantic_compressor,
            "previewer": self.previewer,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def encode(self, images: Images) -> Tensor:
        """Encode images (B, 3, H, W) in [0, 1] to latents x0 (B, 16, H / 32, W / 32) fp32, or find them there."""
        return product(images, "effnet_latent", self.semantic_compressor.encode)

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Encode captions and images to `clip_text` (B, L, D), `clip_text_pooled` (B, 1, D), `clip_img` (B, 1, D').

        Args:
            tokens: from `tokenize`, on the device.
            images: (B, 3, H, W) float in [0, 1], or cached; None, or a stage without image tower = zeros.
            keep_image_B: (B,) bool, which samples keep their image condition, the others get zeros; None = all.
            drawn: not used: this stage draws nothing.
        """
        made = self._encode_text(tokens)
        text, pooled = made["clip_text"], made["clip_text_pooled"]
        if self.image_encoder is None or images is None:
            image = text.new_zeros(text.shape[0], 1, self.network_config.clip_image_in_channels)
        else:
            image = product(images, "clip_img", self.image_encoder.encode).to(text.dtype)
            if keep_image_B is not None:
                image = image * keep_image_B[:, None, None].to(image.dtype)
        return {"clip_text": text, "clip_text_pooled": pooled, "clip_img": image}

    @torch.no_grad()
    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return `effnet_latent` (B, 16, H / 32, W / 32) fp32 and, with an image tower, `clip_img` (B, 1, D')."""
        products = {"effnet_latent": self.semantic_compressor.encode(image_BCHW)}
        if self.image_encoder is not None:
            products["clip_img"] = self.image_encoder.encode(image_BCHW)
        return products

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        stride = self.semantic_compressor.stride
        return self.semantic_compressor.latent_channels, -(-height // stride), -(-width // stride)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Preview latents as images, (B, 3, H', W') fp32 in [0, 1], without gradient."""
        return self.previewer.decode(latent_BCHW).clamp(0, 1)
