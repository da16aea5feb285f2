"""The architecture of Stage B and C as a component: checked here, built on demand, without diffusers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import nn

from cascade_train.options import check_blocks, check_fields

BLOCK_TYPES = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
"""Order of the blocks of a unit; a level without attention leaves out the last."""


@dataclass(kw_only=True, eq=False)
class CascadeUNetConfig:
    """Architecture of a `CascadeUNet`, named as diffusers names it (lists run over levels, top first).

    Args:
        in_channels: channels of the noised latent.
        out_channels: channels of the prediction.
        timestep_ratio_embedding_dim: width of one time embedding.
        patch_size: side of the latent patch that becomes one position.
        conditioning_dim: width of the condition tokens.
        block_out_channels: width of each level.
        num_attention_heads: heads of each level; 0 in a level without attention.
        down_num_layers_per_block: units of each level on the way down.
        up_num_layers_per_block: units of each level on the way up, deepest first.
        down_blocks_repeat_mappers: how often each level runs on the way down.
        up_blocks_repeat_mappers: how often each level runs on the way up, deepest first.
        block_types_per_layer: block names of a unit in each level.
        clip_text_in_channels: width of text tokens; null = the network takes none.
        clip_text_pooled_in_channels: width of the pooled text embedding.
        clip_image_in_channels: width of the image embedding; null = the network takes none.
        clip_seq: condition tokens made of each pooled or image embedding.
        effnet_in_channels: channels of the semantic latents as a condition; null = none.
        pixel_mapper_in_channels: channels of pixels as a condition; null = none.
        kernel_size: side of the depthwise convolutions, odd.
        dropout: dropout probability of each level, in residual blocks and in attention.
        attention_dropout: where dropout acts in attention: on its probabilities, as in the original, or on its output,
            as in diffusers.
        self_attn: whether attention also sees the image positions.
        timestep_conditioning_type: names of the side conditions of time.
        switch_level: per transition whether it halves the resolution; null = strided convolutions.
    """

    in_channels: int
    out_channels: int
    timestep_ratio_embedding_dim: int
    patch_size: int
    conditioning_dim: int
    block_out_channels: list[int]
    num_attention_heads: list[int]
    down_num_layers_per_block: list[int]
    up_num_layers_per_block: list[int]
    down_blocks_repeat_mappers: list[int]
    up_blocks_repeat_mappers: list[int]
    block_types_per_layer: list[list[str]]
    clip_text_in_channels: int | None
    clip_text_pooled_in_channels: int
    clip_image_in_channels: int | None
    clip_seq: int
    effnet_in_channels: int | None
    pixel_mapper_in_channels: int | None
    kernel_size: int
    dropout: list[float]
    self_attn: bool
    timestep_conditioning_type: list[str]
    switch_level: list[bool] | None
    attention_dropout: Literal["probabilities", "output"] = "probabilities"

    def __post_init__(self) -> None:
        check_fields(self, "network.")
        self.arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        del self.arguments["attention_dropout"]
        self.residual_blocks = sum(self.down_num_layers_per_block)
        self._check_levels()
        self._check_numbers()

    def _check_levels(self) -> None:
        levels = len(self.block_out_channels)
        counts = [
            f"{way}_{what}" for way in ("down", "up") for what in ("num_layers_per_block", "blocks_repeat_mappers")
        ]
        for key in (*counts, "num_attention_heads", "block_types_per_layer", "dropout"):
            if len(self.arguments[key]) != levels:
                raise ValueError(
                    f"network.{key}={self.arguments[key]}: needs one entry for each of the {levels} levels "
                    "of network.block_out_channels"
                )
        for key in counts:
            check_blocks(f"network.{key}", self.arguments[key])
        if self.switch_level is not None and len(self.switch_level) != levels - 1:
            raise ValueError(
                f"network.switch_level={self.switch_level}: needs {levels - 1} entries, one for each transition"
            )

    def _check_numbers(self) -> None:
        rows = zip(self.block_out_channels, self.num_attention_heads, self.block_types_per_layer, strict=True)
        for level, (width, heads, types) in enumerate(rows):
            if tuple(types) not in (BLOCK_TYPES, BLOCK_TYPES[:2]):
                raise ValueError(
                    f"network.block_types_per_layer[{level}]={list(types)}: must be {list(BLOCK_TYPES)} "
                    "or the first two of them"
                )
            if tuple(types) == BLOCK_TYPES and (heads < 1 or width % heads):
                raise ValueError(f"network.num_attention_heads[{level}]={heads}: must divide the level's width {width}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"network.kernel_size={self.kernel_size}: must be odd")
        if not all(0 <= p < 1 for p in self.dropout):
            raise ValueError(f"network.dropout={self.dropout}: must lie in [0, 1)")

    def build(self) -> nn.Module:
        """Make the network on the meta device, without memory and without values."""
        from cascade_train.models.cascade.networks.unet import CascadeUNet
        from cascade_train.models.networks.block_network import drop_probabilities

        with torch.device("meta"):
            network = CascadeUNet(**self.arguments)
        if self.attention_dropout == "probabilities":
            drop_probabilities(network)
        return network
