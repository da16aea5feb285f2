"""The control network of Stable Diffusion: diffusers' `ControlNetModel`, in units (Zhang et al. 2023).

Same state-dict keys and config as the parent. Must not live here: its values and its files.

Shape legend: B batch, C channels, H W latent size, L text tokens, D width, H' W' picture size.
"""

from __future__ import annotations

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import Tensor, nn

from cascade_train.models.networks.block_network import BlockNetwork
from cascade_train.models.stable_diffusion.networks.unet import units_of

EMBEDDING_WIDTHS = (16, 32, 96, 256)
"""Of the convolutions over the map; all but the first halve its size (diffusers' default, for a stride of 8)."""


class ConditionControlNet(BlockNetwork, ControlNetModel):
    """Diffusers' control network, whose units are its residual blocks, transformer blocks and samplers."""

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        control_BCHW: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Return what is added to each skip connection, from the top, and last to the middle block's output.

        `control_BCHW` (B, C, H', W') is the map, in [0, 1] where it is a picture; the others as of `ConditionUNet`.
        """
        dtype = self.conv_in.weight.dtype
        added = None if time_ids is None or text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        skips, middle = super().forward(
            sample.to(dtype),
            timestep,
            encoder_hidden_states.to(dtype),
            controlnet_cond=control_BCHW.to(dtype),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return dict(enumerate([*skips, middle]))

    def units(self) -> list[list[nn.Module]]:
        """Return each unit, a list of one module, in order of execution."""
        return [[unit] for block in [*self.down_blocks, self.mid_block] for unit in units_of(block)]


def empty_controlnet(unet: UNet2DConditionModel, *, channels: int, stride: int) -> ConditionControlNet:
    """Return the control network of a UNet, on the meta device.

    Args:
        unet: the network that it is to control; its architecture alone counts.
        channels: of the map.
        stride: pixels of a picture, and its map, for each place of the latents; a power of 2.
    """
    levels = stride.bit_length()
    widths = (*EMBEDDING_WIDTHS, *[EMBEDDING_WIDTHS[-1]] * levels)[:levels]
    with torch.device("meta"):
        network: ConditionControlNet = ConditionControlNet.from_unet(
            unet,
            conditioning_embedding_out_channels=widths,
            load_weights_from_unet=False,
            conditioning_channels=channels,
        )
    return network
