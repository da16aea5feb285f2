"""The architecture of the transformer as a component."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(kw_only=True, eq=False)
class TransformerConfig:
    """Architecture of the transformer, named as diffusers names it."""

    sample_size: int
    patch_size: int
    in_channels: int
    out_channels: int
    num_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    caption_projection_dim: int
    pooled_projection_dim: int
    pos_embed_max_size: int

    def __post_init__(self) -> None:
        self.arguments: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}

    def build(self) -> Any:
        from cascade_train.models.rectified_flow.network import FlowTransformer, positions

        with torch.device("meta"):
            network = FlowTransformer(**self.arguments)
        network.pos_embed.pos_embed = positions(network)
        return network
