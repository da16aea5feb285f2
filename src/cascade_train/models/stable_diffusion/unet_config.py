"""The architecture of Stable Diffusion's network as a component: checked here, built on demand, without diffusers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

from cascade_train.options import check_blocks

DOWN, CROSS_DOWN = "DownBlock2D", "CrossAttnDownBlock2D"
UP, CROSS_UP = "UpBlock2D", "CrossAttnUpBlock2D"


@dataclass(kw_only=True, eq=False)
class ConditionUNetConfig:
    """Architecture of a `ConditionUNet`, named as diffusers' `UNet2DConditionModel` names it.

    Lists run over levels, top first; those of the way up, deepest first.

    Args:
        sample_size: side of the latents that it is made for; for the exported configuration alone.
        in_channels: channels of the noised latent.
        out_channels: channels of the prediction.
        block_out_channels: width of each level.
        layers_per_block: residual blocks of each level on the way down; one more on the way up.
        down_block_types: of each level, DownBlock2D or CrossAttnDownBlock2D.
        up_block_types: of each level, UpBlock2D or CrossAttnUpBlock2D.
        transformer_layers_per_block: transformer blocks after each residual block, for each level.
        attention_head_dim: heads of each level, not their width: diffusers keeps the wrong name for its folders' sake.
        cross_attention_dim: width of the text embedding.
        use_linear_projection: whether transformers begin and end with a linear layer; false = a convolution.
        upcast_attention: whether attention scores are computed in fp32.
        addition_embed_type: text_time = pooled text and sizes are conditions too (SDXL); null = they are not.
        addition_time_embed_dim: width of the embedding of each size.
        projection_class_embeddings_input_dim: width of pooled text and embedded sizes together.
        dropout: of residual blocks, in [0, 1).
        act_fn: activation by its diffusers name.
        norm_num_groups: groups of every group norm.
        norm_eps: added to variances in norms.
        downsample_padding: of the strided convolutions.
        mid_block_scale_factor: what the middle block's outputs are divided by.
        center_input_sample: whether latents in [0, 1] become [-1, 1].
        flip_sin_to_cos: whether cosines come before sines in the embedding of timesteps.
        freq_shift: shift of its frequencies.
    """

    sample_size: int
    in_channels: int
    out_channels: int
    block_out_channels: list[int]
    layers_per_block: int
    down_block_types: list[str]
    up_block_types: list[str]
    transformer_layers_per_block: list[int]
    attention_head_dim: list[int]
    cross_attention_dim: int
    use_linear_projection: bool
    upcast_attention: bool
    addition_embed_type: Literal["text_time"] | None
    addition_time_embed_dim: int | None
    projection_class_embeddings_input_dim: int | None
    dropout: float
    act_fn: str
    norm_num_groups: int
    norm_eps: float
    downsample_padding: int
    mid_block_scale_factor: float
    center_input_sample: bool
    flip_sin_to_cos: bool
    freq_shift: int

    def __post_init__(self) -> None:
        self.arguments: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        levels = len(self.block_out_channels)
        for key in ("down_block_types", "up_block_types", "transformer_layers_per_block", "attention_head_dim"):
            if len(self.arguments[key]) != levels:
                raise ValueError(
                    f"network.{key}={self.arguments[key]}: needs one entry for each of the {levels} levels of "
                    "network.block_out_channels"
                )
        for key in ("layers_per_block", "transformer_layers_per_block"):
            check_blocks(f"network.{key}", self.arguments[key])
        for key, known in (("down_block_types", (DOWN, CROSS_DOWN)), ("up_block_types", (UP, CROSS_UP))):
            if not set(self.arguments[key]) <= set(known):
                raise ValueError(f"network.{key}={self.arguments[key]}: may have {' and '.join(known)} alone")
        for width, heads in zip(self.block_out_channels, self.attention_head_dim, strict=True):
            if heads < 1 or width % heads or width % self.norm_num_groups:
                raise ValueError(
                    f"network.block_out_channels={self.block_out_channels}: {width} must be a multiple of its "
                    f"{heads} heads (network.attention_head_dim) and of network.norm_num_groups={self.norm_num_groups}"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"network.dropout={self.dropout}: is a probability, give one in [0, 1)")

    def build(self) -> nn.Module:
        """Make the network on the meta device, without memory and without values."""
        from cascade_train.models.stable_diffusion.networks.unet import ConditionUNet

        with torch.device("meta"):
            return ConditionUNet(**self.arguments)
