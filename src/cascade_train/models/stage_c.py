"""Stage C: semantic latents from text and, optionally, an image.

Lives here: how images and captions become latents and conditions. Must not live here: the modules, and what trains.

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
        image_encoder: frozen image tower; null = the image condition is always zeros.
        semantic_compressor: images to latents.
        previewer: latents to small images.
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
        if network.clip_text_in_channels is None or network.clip_image_in_channels is None:
            raise ValueError("model.network.clip_text_in_channels and clip_image_in_channels: Stage C needs both")
        self.image_encoder = image_encoder
        self.previewer = previewer
        self.image_products = {"effnet_latent": "semantic_compressor"}
        self.caption_products = dict.fromkeys(("clip_text", "clip_text_pooled"), "text_encoder")
        widths = [
            ("in_channels", "semantic_compressor.latent_channels", semantic_compressor.latent_channels),
            ("clip_text_in_channels", "text_encoder.hidden_size", text_encoder.hidden_size),
            ("clip_text_pooled_in_channels", "text_encoder.projection_dim", text_encoder.projection_dim),
        ]
        if image_encoder is not None:
            self.image_products["clip_img"] = "image_encoder"
            widths.append(("clip_image_in_channels", "image_encoder.projection_dim", image_encoder.projection_dim))
        super().__init__(
            {"image_encoder": image_encoder, "previewer": previewer},
            widths,
            image_size=image_size,
            precision=precision,
            seed=seed,
            random_encoders=random_encoders,
            weights=weights,
            network=network,
            text_encoder=text_encoder,
            semantic_compressor=semantic_compressor,
        )

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

        `clip_img` is zeros without images, without an image tower, and for samples that do not keep theirs.
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
