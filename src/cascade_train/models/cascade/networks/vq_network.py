"""Stage A's network: diffusers' `PaellaVQModel` with a forward pass that training needs, and upkeep of its codebook.

Must not live here: losses (tasks/vqgan.py), and Stage A as a frozen part of Stage B (latent_codec.py).

Shape legend: B batch, C latent channels, H W image size, h w latent size, N latent positions, K codes, G candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import MixingResidualBlock, PaellaVQModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cascade_train.models.initialize import Fill, kernel_rule, torch_uniform


@dataclass(frozen=True, kw_only=True)
class Autoencoded:
    """What the network makes of images.

    Attributes:
        image_BCHW: (B, 3, H, W) reconstructions, not clamped.
        latent_BChw: (B, C, h, w) latents, before quantisation and not divided by the scale factor.
        code_BChw: (B, C, h, w) the nearest entry of the codebook to each latent, with a gradient to the codebook.
        index_Bhw: (B, h, w) int64, which entry that is.
    """

    image_BCHW: Tensor
    latent_BChw: Tensor
    code_BChw: Tensor
    index_Bhw: Tensor


class VQNetwork(PaellaVQModel):
    """`PaellaVQModel` whose norm at the latent keeps its statistics in any mode.

    From scratch those statistics are mean 0 and variance 1, so that the layer is a scale and a shift for each channel,
    which train. Statistics of a batch would make a sample depend on its neighbours, and they erase the absolute colour
    of plain images. `gradient_checkpointing` recomputes the activations of each residual block in backward.
    """

    gradient_checkpointing = False

    def units(self) -> list[list[nn.Module]]:
        """Return the residual blocks, in execution order, one each."""
        return [[module] for module in self.modules() if isinstance(module, MixingResidualBlock)]

    def encoder_modules(self) -> list[nn.Module]:
        """Return what makes latents and codes."""
        return [self.in_block, self.down_blocks, self.vquantizer]

    def decoder_modules(self) -> list[nn.Module]:
        """Return what makes images of latents."""
        return [self.up_blocks, self.out_block]

    def forward(self, sample: Tensor, *, quantised_B: Tensor | None = None, only: str | None = None) -> Any:
        """Encode, quantise and decode; everything through `forward`, so that a sharded network is gathered.

        `sample` is (B, 3, H, W) float in [0, 1]. `quantised_B`, (B,) bool, are the samples whose codes are decoded
        instead of latents, with a straight-through gradient; None = none, as Stage B uses Stage A. Returns an
        `Autoencoded`, but with `only="encode"` the latents alone, and with "decode" images of latents (B, C, h, w).
        """
        if only == "decode":
            return self._decode(sample)
        latent_BChw = self._encode(sample)
        if only == "encode":
            return latent_BChw
        code_BChw, index_Bhw = self.quantise(latent_BChw)
        decoded_BChw = latent_BChw
        if quantised_B is not None:
            straight_BChw = latent_BChw + (code_BChw - latent_BChw).detach()
            decoded_BChw = torch.where(quantised_B[:, None, None, None], straight_BChw, latent_BChw)
        return Autoencoded(
            image_BCHW=self._decode(decoded_BChw), latent_BChw=latent_BChw, code_BChw=code_BChw, index_Bhw=index_Bhw
        )

    def quantise(self, latent_BChw: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest codes (B, C, h, w) fp32 to latents, and their numbers (B, h, w); one sample at a time."""
        weight_KC = self.vquantizer.embedding.weight.float()
        with torch.no_grad():
            rows_BNC = latent_BChw.float().flatten(2).transpose(1, 2)
            index_BN = torch.stack([torch.cdist(rows_NC, weight_KC).argmin(dim=1) for rows_NC in rows_BNC])
        index_Bhw = index_BN.view(len(latent_BChw), *latent_BChw.shape[2:])
        code_BhwC = nn.functional.embedding(index_Bhw, weight_KC)
        return code_BhwC.permute(0, 3, 1, 2).clone(), index_Bhw.clone()

    def _encode(self, image_BCHW: Tensor) -> Tensor:
        *blocks, (convolution, norm) = self.down_blocks
        x = self._run(blocks, self.in_block(image_BCHW.to(convolution.weight.dtype)))
        # In fp32, also where compute is bf16: statistics are, and latents are what codes are compared with.
        scale, shift = norm.weight.float(), norm.bias.float()
        statistics = (norm.running_mean, norm.running_var)
        return nn.functional.batch_norm(convolution(x).float(), *statistics, scale, shift, training=False, eps=norm.eps)

    def _decode(self, latent_BChw: Tensor) -> Tensor:
        dtype = self.up_blocks[0][0].weight.dtype
        # A clone, since FSDP warns of views, which pixel shuffling returns.
        return self.out_block(self._run(self.up_blocks, latent_BChw.to(dtype))).float().clone()

    def _run(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled() and isinstance(block, MixingResidualBlock):
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


_KERNELS = kernel_rule(torch_uniform)


def vq_rule(name: str, parameter: nn.Parameter) -> Fill:
    """Return the initial values of a parameter: torch's own for convolutions and linear layers, with biases zero.

    Residual blocks begin as the identity (their scalars are zero, as in the original), the norm's scale at one, and
    codes as normals.
    """
    if name == "vquantizer.embedding.weight":
        return Fill(kind="normal", scale=1.0)
    return _KERNELS(name, parameter)


def count_codes(index: Tensor, entries: int) -> Tensor:
    """Return how often each of the `entries` codes occurs among the numbers `index`, (K,) fp32."""
    flat = index.flatten()
    return torch.zeros(entries, device=flat.device).index_add_(0, flat, torch.ones(len(flat), device=flat.device))


def unused_since(unused_K: Tensor, count_K: Tensor) -> Tensor:
    """Return for how many steps each code has not been chosen, (K,) int64, after a step that chose it so often."""
    return torch.where(count_K > 0, 0, unused_K + 1)


@torch.no_grad()
def revive(weight: nn.Parameter, unused_K: Tensor, candidate_GC: Tensor, *, after_steps: int) -> Tensor:
    """Replace codes that have not been chosen for `after_steps` steps by candidates, the lowest numbers first.

    The i-th dead code takes the i-th candidate; more dead codes than candidates wait. The same on every rank; sends
    nothing and waits for no device. `weight` is (K, C), whole or this rank's shard; `unused_K` (K,) int64, for how many
    steps each code has not been chosen; `candidate_GC` (G, C) fp32 latents of the step's global batch. Returns
    `unused_K`, 0 for codes that were replaced.
    """
    dead_K = unused_K >= after_steps
    place_K = dead_K.long().cumsum(0) - 1
    replaced_K = dead_K & (place_K < len(candidate_GC))
    rows_KC = candidate_GC[place_K.clamp(0, len(candidate_GC) - 1)]
    mine_K1, rows = (_own_rows(weight, whole) for whole in (replaced_K[:, None].to(rows_KC.dtype), rows_KC))
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    local.copy_(torch.where(mine_K1 > 0, rows.to(local.dtype), local))
    return torch.where(replaced_K, 0, unused_K)


def _own_rows(weight: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that every rank has whole; nothing is sent."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
