"""The architecture of a denoising network as a component: numbers checked here, the module made on demand.

Must not live here: weights, and anything that imports diffusers before `build`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from cascade_train.options import check_blocks

if TYPE_CHECKING:
    from cascade_train.models.cascade.networks.unet import CascadeUNet

BLOCK_TYPES = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
"""Order of the blocks of a unit; a level without attention leaves out the last."""


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
        effnet_in_channels: channels of the semantic latent condition; null = none.
        pixel_mapper_in_channels: channels of the pixel condition; null = none.
        kernel_size: side of the depthwise convolutions, odd.
        dropout: dropout probability of each level, in residual blocks and in attention.
        attention_dropout: where dropout acts in attention: on its probabilities, as in the original, or on its output,
            as in diffusers.
        self_attn: whether attention also sees the image positions.
        timestep_conditioning_type: names of the side conditions of time.
        switch_level: per transition whether it halves the resolution; null = strided convolutions.

    Raises:
        ValueError: lists of different length, heads that do not divide the width, or a number out of range.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        timestep_ratio_embedding_dim: int,
        patch_size: int,
        conditioning_dim: int,
        block_out_channels: list[int],
        num_attention_heads: list[int],
        down_num_layers_per_block: list[int],
        up_num_layers_per_block: list[int],
        down_blocks_repeat_mappers: list[int],
        up_blocks_repeat_mappers: list[int],
        block_types_per_layer: list[list[str]],
        clip_text_in_channels: int | None,
        clip_text_pooled_in_channels: int,
        clip_image_in_channels: int | None,
        clip_seq: int,
        effnet_in_channels: int | None,
        pixel_mapper_in_channels: int | None,
        kernel_size: int,
        dropout: list[float],
        self_attn: bool,
        timestep_conditioning_type: list[str],
        switch_level: list[bool] | None,
        attention_dropout: Literal["probabilities", "output"] = "probabilities",
    ) -> None:
        self.arguments = {k: value for k, value in locals().items() if k not in ("self", "attention_dropout")}
        self.attention_dropout = attention_dropout
        self.in_channels = in_channels
        self.clip_text_in_channels = clip_text_in_channels
        self.clip_text_pooled_in_channels = clip_text_pooled_in_channels
        self.clip_image_in_channels = clip_image_in_channels
        self.residual_blocks = sum(down_num_layers_per_block)
        self._check_levels()
        self._check_numbers()

    def _check_levels(self) -> None:
        levels = len(self.arguments["block_out_channels"])
        per_level = (
            "num_attention_heads",
            "down_num_layers_per_block",
            "up_num_layers_per_block",
            "down_blocks_repeat_mappers",
            "up_blocks_repeat_mappers",
            "block_types_per_layer",
            "dropout",
        )
        for key in per_level:
            if len(self.arguments[key]) != levels:
                raise ValueError(
                    f"network.{key}={self.arguments[key]}: needs one entry for each of the {levels} levels "
                    "of network.block_out_channels"
                )
        for key in per_level[1:5]:
            check_blocks(f"network.{key}", self.arguments[key])
        switch = self.arguments["switch_level"]
        if switch is not None and len(switch) != levels - 1:
            raise ValueError(f"network.switch_level={switch}: needs {levels - 1} entries, one for each transition")

    def _check_numbers(self) -> None:
        rows = zip(*(self.arguments[k] for k in ("block_out_channels", "num_attention_heads")), strict=True)
        for level, (width, heads) in enumerate(rows):
            types = tuple(self.arguments["block_types_per_layer"][level])
            if types not in (BLOCK_TYPES, BLOCK_TYPES[:2]):
                raise ValueError(
                    f"network.block_types_per_layer[{level}]={list(types)}: must be {list(BLOCK_TYPES)} "
                    "or the first two of them"
                )
            if types == BLOCK_TYPES and (heads < 1 or width % heads):
                raise ValueError(f"network.num_attention_heads[{level}]={heads}: must divide the level's width {width}")
        if self.arguments["kernel_size"] % 2 == 0:
            raise ValueError(f"network.kernel_size={self.arguments['kernel_size']}: must be odd")
        if not all(0 <= p < 1 for p in self.arguments["dropout"]):
            raise ValueError(f"network.dropout={self.arguments['dropout']}: must lie in [0, 1)")
        if self.attention_dropout not in ("probabilities", "output"):
            raise ValueError(
                f"network.attention_dropout={self.attention_dropout}: choose probabilities (the original's) or output"
            )

    def build(self) -> CascadeUNet:
        """Make the network on the meta device, without memory and without values."""
        from cascade_train.models.cascade.networks.unet import CascadeUNet
        from cascade_train.models.networks.block_network import drop_probabilities

        with torch.device("meta"):
            network = CascadeUNet(**self.arguments)
        if self.attention_dropout == "probabilities":
            drop_probabilities(network)
        return network
