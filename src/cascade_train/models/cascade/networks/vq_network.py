"""Stage A's network: diffusers' `PaellaVQModel` with a forward pass that training needs.

Shape legend: B batch, C latent channels, H W image size, h w latent size, N latent positions, K codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import MixingResidualBlock, PaellaVQModel
from torch import Tensor, nn
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
    return Fill(kind="normal", scale=1.0) if name == "vquantizer.embedding.weight" else _KERNELS(name, parameter)
