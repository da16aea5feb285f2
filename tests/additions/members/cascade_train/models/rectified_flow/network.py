"""The transformer in units."""

from __future__ import annotations

from contextlib import nullcontext

from cascade_train.models.rectified_flow.family import RECTIFIED_FLOW
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cascade_train.errors import ConfigError
from cascade_train.models.networks.block_network import BlockNetwork


class FlowTransformer(BlockNetwork, SD3Transformer2DModel):
    """Diffusers' transformer, whose units are its blocks."""

    family = RECTIFIED_FLOW
    by_matrix = False

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, pooled_projections: Tensor
    ) -> Tensor:
        dtype = self.proj_out.weight.dtype
        cond = (encoder_hidden_states.to(dtype), pooled_projections.to(dtype), timestep)
        with sdpa_kernel(SDPBackend.MATH) if self.by_matrix else nullcontext():
            return super().forward(sample.to(dtype), *cond, return_dict=False)[0]

    def units(self) -> list[list[nn.Module]]:
        return [[block] for block in self.transformer_blocks]

    def set_attention(self, name: str) -> None:
        if name not in ("sdpa", "math"):
            raise ConfigError(f"attention={name}: this network has sdpa and math")
        self.by_matrix = name == "math"


def positions(network: SD3Transformer2DModel) -> Tensor:
    """Return the buffer of positions, which the meta device has no values for."""
    side, embedding = network.config.pos_embed_max_size, network.pos_embed
    made = get_2d_sincos_pos_embed(network.inner_dim, side, base_size=embedding.base_size, output_type="pt")
    return made.float()[None]
