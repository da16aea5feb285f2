"""Networks of Stable Diffusion: diffusers' UNet and control network (Zhang et al. 2023), in units.

Same state-dict keys and configs as the parents, so folders and pipelines of diffusers fit. Must not live here: weights,
and what the networks are conditioned on (stage.py).

Shape legend: B batch, C channels, H W latent size, L text tokens, D width, H' W' picture size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import Tensor, nn

from cascade_train.models.networks.block_network import BlockNetwork
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION

EMBEDDING_WIDTHS = (16, 32, 96, 256)
"""Of the convolutions over a control map; all but the first halve its size (diffusers' default, for a stride of 8)."""


class UnitNetwork(BlockNetwork):
    """Mixed into a network of diffusers: its units are residual blocks, transformer blocks and samplers.

    The parent finds blocks by attributes of the levels that hold them, and calls every unit as a module: hooks of FSDP2
    and `compile()` act on units in place.
    """

    conv_in: nn.Module
    down_blocks: Any
    mid_block: nn.Module

    def units(self) -> list[list[nn.Module]]:
        """Return each unit, a list of one module, in order of execution."""
        blocks = [*self.down_blocks, self.mid_block, *getattr(self, "up_blocks", ())]
        return [[unit] for block in blocks for unit in _units_of(block)]

    def _cast(
        self, sample: Tensor, text: Tensor, text_embeds: Tensor | None, time_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return latents and text in the dtype of the weights, and the other arguments of the parent's `forward`."""
        dtype = self.conv_in.weight.dtype
        added = None if time_ids is None or text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        return sample.to(dtype), text.to(dtype), {"added_cond_kwargs": added, "return_dict": False}


class ConditionUNet(UnitNetwork, UNet2DConditionModel):
    """Diffusers' UNet, whose units are its residual blocks, transformer blocks and samplers, each a module."""

    family = STABLE_DIFFUSION

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
        control: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Predict the diffusion target, of the shape of `sample`, in the dtype of the weights.

        Args:
            sample: (B, C, H, W) noised latent, cast to the dtype of the weights.
            timestep: (B,) in fp32, whole or not; embedded in fp32.
            encoder_hidden_states: (B, L, D) text.
            text_embeds: (B, D') pooled text, with `time_ids` (SDXL).
            time_ids: (B, 6) height and width of the original, top and left of the crop, height and width of the target.
            control: what is added to each skip connection, from the top, and last to the middle block's output.
        """
        latent, text, options = self._cast(sample, encoder_hidden_states, text_embeds, time_ids)
        if control is not None:
            *skips, middle = (control[place].to(latent.dtype) for place in range(len(control)))
            options |= {"down_block_additional_residuals": skips, "mid_block_additional_residual": middle}
        return super().forward(latent, timestep, text, **options)[0]


class ConditionControlNet(UnitNetwork, ControlNetModel):
    """Diffusers' control network, with units of the same kinds as `ConditionUNet`."""

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
        latent, text, options = self._cast(sample, encoder_hidden_states, text_embeds, time_ids)
        map_BCHW = control_BCHW.to(latent.dtype)
        skips, middle = super().forward(latent, timestep, text, controlnet_cond=map_BCHW, **options)
        return dict(enumerate([*skips, middle]))


def empty_controlnet(unet: UNet2DConditionModel, *, channels: int, stride: int) -> ConditionControlNet:
    """Return the control network of a UNet on the meta device, for maps of `channels`.

    `stride` is the pixels of a picture, and its map, for each place of the latents; a power of 2.
    """
    levels = stride.bit_length()
    widths = (*EMBEDDING_WIDTHS, *[EMBEDDING_WIDTHS[-1]] * levels)[:levels]
    options = {"conditioning_embedding_out_channels": widths, "conditioning_channels": channels}
    with torch.device("meta"):
        return ConditionControlNet.from_unet(unet, load_weights_from_unet=False, **options)


def _units_of(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the units of a level in order of execution: a residual block and its transformer, in turns, then samplers.

    The middle has one more residual block, at the end.
    """
    attentions = getattr(block, "attentions", ())
    for layer in chain.from_iterable(zip_longest(block.resnets, attentions)):
        if layer is not None:
            yield from getattr(layer, "transformer_blocks", (layer,))
    for name in ("downsamplers", "upsamplers"):
        yield from getattr(block, name, None) or ()
