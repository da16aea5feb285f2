"""Stage C: semantic latents from text and, optionally, an image; and what it has in common with Stage B.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cascade_train.models.cascade.control import FeatureControl
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.image_encoder import ImageEncoder
from cascade_train.models.cascade.previewer import Previewer
from cascade_train.models.cascade.semantic_compressor import SemanticCompressor
from cascade_train.models.cascade.unet_config import CascadeUNetConfig
from cascade_train.models.control import Conditions, Control, ControlOptions
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.initialize import Rule, unet_rule
from cascade_train.models.stage import Images, Save, Tokens, product, to_device
from cascade_train.options import Free


@dataclass(kw_only=True, eq=False, repr=False)
class CascadeStage(DenoisingStage):
    """A stage whose network is a `CascadeUNet`, with the original's initialisation where it has no weights.

    Args:
        kernels: "fused" = GELU, response norm and dropout of a residual block as one operator; "eager" = one by one.
        semantic_compressor: images to semantic latents.
    """

    family = CASCADE
    noise_unit = "time"
    multiple_of = "semantic_compressor"

    kernels: Free[Literal["eager", "fused"]] = "eager"
    network: CascadeUNetConfig
    semantic_compressor: SemanticCompressor

    def _build_network(self, dtype: torch.dtype) -> None:
        from cascade_train.models.cascade.networks.response_norm import set_kernels  # heavy: diffusers

        super()._build_network(dtype)
        set_kernels(self.network, self.kernels)

    def _rule(self) -> Rule:
        return unet_rule(self.network_config.residual_blocks)

    def _pipelines(self) -> Any:
        """Return the module that writes pipelines of diffusers."""
        from cascade_train.models.cascade.formats import export_pipelines  # heavy: diffusers

        return export_pipelines

    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return `clip_text` (B, L, D) and `clip_text_pooled` (B, 1, D)."""
        text, pooled = self.text_encoder.encode(tokens)
        if pooled is None:
            raise AssertionError("a tower without projection is refused before")
        return {"clip_text": text, "clip_text_pooled": pooled}


@dataclass(kw_only=True, eq=False, repr=False)
class StageC(CascadeStage):
    """Stage C of Stable Cascade, at any size.

    Args:
        image_encoder: frozen image tower; null = the image condition is always zeros.
        previewer: latents to small images.
    """

    name = "stage_c"
    abilities = frozenset({"denoising", "text_to_image", "control", "previewer", "semantic_latents"})
    part = "prior"
    frozen_parts = ("text_encoder", "semantic_compressor", "image_encoder", "previewer")
    widths = (
        ("in_channels", "semantic_compressor", "latent_channels"),
        ("clip_text_in_channels", "text_encoder", "hidden_size"),
        ("clip_text_pooled_in_channels", "text_encoder", "projection_dim"),
        ("clip_image_in_channels", "image_encoder", "projection_dim"),
    )
    encoded_by = "semantic_compressor"
    decoded_by = "previewer"
    image_keep_prob = 0.1
    guidance_scale = 4.0
    needs_image = False
    latent_name = "effnet_latent"
    encodes_nothing = frozenset({"network", "previewer"})

    image_encoder: ImageEncoder | None
    previewer: Previewer

    def __post_init__(self) -> None:
        if self.network.clip_text_in_channels is None or self.network.clip_image_in_channels is None:
            raise ValueError("model.network.clip_text_in_channels and clip_image_in_channels: Stage C needs both")
        self.image_products = {"effnet_latent": "semantic_compressor"}
        if self.image_encoder is not None:
            self.image_products["clip_img"] = "image_encoder"
        self.caption_products = dict.fromkeys(("clip_text", "clip_text_pooled"), "text_encoder")
        super().__post_init__()

    def conditions(
        self, tokens: Tokens, images: Images | None = None, keep_image_B: Tensor | None = None, drawn: Any = None
    ) -> Conditions:
        """Encode captions and images to `clip_text` (B, L, D), `clip_text_pooled` (B, 1, D), `clip_img` (B, 1, D').

        `clip_img` is zeros without images, without an image tower, and for samples that do not keep theirs, which the
        tower does not see.
        """
        made = self._encode_text(tokens)
        text, pooled = made["clip_text"], made["clip_text_pooled"]
        kept = list(range(len(text))) if keep_image_B is None else [i for i, k in enumerate(keep_image_B.tolist()) if k]
        image = text.new_zeros(len(text), 1, self.network_config.clip_image_in_channels)
        if self.image_encoder is not None and images is not None and kept:
            rows = to_device(torch.tensor(kept), text.device)
            chosen = images[rows] if isinstance(images, Tensor) else {"clip_img": images["clip_img"][rows]}
            image = image.index_copy(0, rows, product(chosen, "clip_img", self.image_encoder.encode).to(text.dtype))
        return {"clip_text": text, "clip_text_pooled": pooled, "clip_img": image}

    def add_control(self, options: ControlOptions, device: torch.device) -> Control:
        """Return a control network, see `FeatureControl`."""
        return FeatureControl(self.network, options, device)

    def exports(self) -> Mapping[str, Save]:
        """Return `prior`, a folder that diffusers' prior pipeline loads."""
        return {self.part: partial(self._pipelines().save_prior, self)}
