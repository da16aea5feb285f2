"""The denoising network of Stable Diffusion: diffusers' `UNet2DConditionModel`, in units.

Lives here: what shards, recomputes and compiles together, and the dtypes at its entrance. Must not live here: weights,
and what the network is conditioned on (stable_diffusion.py).

Same state-dict keys and config as the parent, so folders and pipelines of diffusers fit.

Shape legend: B batch, C channels, H W latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from cascade_train.models.networks.block_network import BlockNetwork
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION


class ConditionUNet(BlockNetwork, UNet2DConditionModel):
    """Diffusers' UNet, whose units are its residual blocks, transformer blocks and samplers, each a module of its own.

    The parent finds blocks by attributes of the levels that hold them, and calls every unit as a module: hooks of FSDP2
    and `compile()` act on units in place.
    """

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
        dtype = self.conv_in.weight.dtype
        added = None if time_ids is None or text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        residuals: dict[str, Any] = {}
        if control is not None:
            *skips, middle = (control[place].to(dtype) for place in range(len(control)))
            residuals = {"down_block_additional_residuals": skips, "mid_block_additional_residual": middle}
        found: Tensor = super().forward(
            sample.to(dtype),
            timestep,
            encoder_hidden_states.to(dtype),
            added_cond_kwargs=added,
            return_dict=False,
            **residuals,
        )[0]
        return found

    def units(self) -> list[list[nn.Module]]:
        """Return each unit, a list of one module, in order of execution."""
        blocks = [*self.down_blocks, self.mid_block, *self.up_blocks]
        return [[unit] for block in blocks for unit in units_of(block)]


def units_of(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the units of a level in order of execution: a residual block and its transformer, in turns, then samplers.

    The middle has one more residual block, at the end.
    """
    attentions = getattr(block, "attentions", ())
    for layer in chain.from_iterable(zip_longest(block.resnets, attentions)):
        if layer is not None:
            yield from getattr(layer, "transformer_blocks", (layer,))
    for name in ("downsamplers", "upsamplers"):
        yield from getattr(block, name, None) or ()
