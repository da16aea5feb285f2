"""What the denoising stages of Stable Cascade share: the network's kind, its initial values, and their text tower.

Must not live here: what is modelled and what it is conditioned on (stage_b.py, stage_c.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.semantic_compressor import SemanticCompressor
from cascade_train.models.cascade.unet_config import CascadeUNetConfig
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.initialize import DrawnValues, unet_rule
from cascade_train.models.stage import Tokens
from cascade_train.options import Free


@dataclass(kw_only=True, eq=False, repr=False)
class CascadeStage(DenoisingStage):
    """A stage whose network is a `CascadeUNet`, with the original's initialisation where it has no weights.

    Args:
        network: architecture of the network.
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

        self.network = self.network_config.build()
        set_kernels(self.network, self.kernels)
        nn.Module.to(self.network, dtype)  # diffusers' own `to` warns about modules to keep in fp32, without any
        if self.weights is None:
            self._values = DrawnValues(self.network, unet_rule(self.network_config.residual_blocks), seed=self.seed)
        else:
            self._values = StoredValues(self.network, self.weights, part=self.part)

    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return `clip_text` (B, L, D) and `clip_text_pooled` (B, 1, D)."""
        text, pooled = self.text_encoder.encode(tokens)
        if pooled is None:
            raise AssertionError("a tower without projection is refused before")
        return {"clip_text": text, "clip_text_pooled": pooled}
