"""Stage C: semantic latents from text and, optionally, an image.

Lives here: which modules make up the stage, and how images and captions become latents and conditions. Must not live
here: the modules themselves, and anything about what trains.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.models.cascade_unet import CascadeUNet
from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.image_encoder import ImageEncoder
from cascade_train.models.initialize import initialise, unet_rule
from cascade_train.models.previewer import Previewer
from cascade_train.models.semantic_compressor import SemanticCompressor
from cascade_train.models.stage import Conditions, Stage, Tokens
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.models.weights import load_network


class StageC(Stage):
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
    image_keep_prob = 0.1
    needs_image = False
    network: CascadeUNet

    def __init__(
        self,
        *,
        image_size: int,
        precision: Literal["bf16", "fp32"],
        seed: int,
        random_encoders: bool,
        weights: str | None,
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
        self._check()
        if random_encoders:
            for part in self._parts().values():
                part.forget_weights()

    def _check(self) -> None:
        if self.image_size < self.image_multiple or self.image_size % self.image_multiple:
            raise ValueError(
                f"model.image_size={self.image_size}: must be a multiple of {self.image_multiple} pixels, "
                "the stride of the semantic compressor"
            )
        if self.network_config.clip_text_in_channels is None or self.network_config.clip_image_in_channels is None:
            raise ValueError("model.network.clip_text_in_channels and clip_image_in_channels: Stage C needs both")
        widths = [
            ("in_channels", "semantic_compressor.latent_channels", self.semantic_compressor.latent_channels),
            ("clip_text_in_channels", "text_encoder.hidden_size", self.text_encoder.hidden_size),
            ("clip_text_pooled_in_channels", "text_encoder.projection_dim", self.text_encoder.projection_dim),
        ]
        if self.image_encoder is not None:
            widths.append(("clip_image_in_channels", "image_encoder.projection_dim", self.image_encoder.projection_dim))
        for key, other, width in widths:
            if getattr(self.network_config, key) != width:
                raise ValueError(
                    f"model.network.{key}={getattr(self.network_config, key)}: must equal model.{other}={width}"
                )

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make every module on the meta device, then load or initialise it on `device`.

        The text and image towers take `frozen_dtype`; compressor and previewer stay fp32, as in the original.

        Raises:
            ConfigError: weights that do not exist or belong to another model.
        """
        self.network = self.network_config.build()
        if self.weights is None:
            rule = unet_rule(self.network_config.residual_blocks)
            initialise(self.network, rule, device=device, dtype=network_dtype, seed=self.seed)
        else:
            load_network(self.network, self.weights, dtype=network_dtype, device=device)
        self.text_encoder.build(device=device, dtype=frozen_dtype)
        if self.image_encoder is not None:
            self.image_encoder.build(device=device, dtype=frozen_dtype)
        self.semantic_compressor.build(device=device)
        self.previewer.build(device=device)

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return text tower, compressor, previewer and, where there is one, the image tower."""
        return {name: part.module for name, part in self._parts().items()}

    def _parts(self) -> dict[str, TextEncoder | ImageEncoder | SemanticCompressor | Previewer]:
        parts = {
            "text_encoder": self.text_encoder,
            "image_encoder": self.image_encoder,
            "semantic_compressor": self.semantic_compressor,
            "previewer": self.previewer,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Turn captions into token ids and attention mask, (B, L) int64 on the host."""
        return self.text_encoder.tokenize(captions)

    def notices(self) -> list[str]:
        """Say how many captions were cut since the last call, if any."""
        return self.text_encoder.notices()

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to latents x0 (B, 16, H / 32, W / 32) fp32. No gradient."""
        return self.semantic_compressor.encode(image_BCHW)

    def conditions(
        self,
        tokens: Tokens,
        image_BCHW: Tensor | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Encode captions and images to `clip_text` (B, L, D), `clip_text_pooled` (B, 1, D), `clip_img` (B, 1, D').

        Args:
            tokens: from `tokenize`, on the device.
            image_BCHW: (B, 3, H, W) float in [0, 1]; None, or a stage without image tower = zeros.
            keep_image_B: (B,) bool, which samples keep their image condition, the others get zeros; None = all.
            drawn: not used: this stage draws nothing.
        """
        text, pooled = self.text_encoder.encode(tokens)
        if self.image_encoder is None or image_BCHW is None:
            image = text.new_zeros(text.shape[0], 1, self.network_config.clip_image_in_channels)
        else:
            image = self.image_encoder.encode(image_BCHW)
            if keep_image_B is not None:
                image = image * keep_image_B[:, None, None].to(image.dtype)
        return {"clip_text": text, "clip_text_pooled": pooled, "clip_img": image}

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        stride = self.semantic_compressor.stride
        return self.semantic_compressor.latent_channels, -(-height // stride), -(-width // stride)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Preview latents as images, (B, 3, H', W') fp32 in [0, 1], without gradient."""
        return self.previewer.decode(latent_BCHW).clamp(0, 1)

    def units(self) -> list[list[nn.Module]]:
        """Return the network's (residual, timestep, attention) triples, in execution order."""
        return self.network.units()

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network: "sdpa", "xformers" or "math".

        Raises:
            ConfigError: the kernel's library is missing.
        """
        self.network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the activations of each triple in backward instead of keeping them."""
        self.network.gradient_checkpointing = enabled
