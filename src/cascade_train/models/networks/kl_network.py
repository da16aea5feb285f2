"""The network of a KL autoencoder as it trains: diffusers' `AutoencoderKL`, all of it through `forward`.

Shape legend: B batch, C latent channels, H W image size, h w latent size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from cascade_train.models.networks.block_network import BlockNetwork


@dataclass(frozen=True, kw_only=True)
class Reconstructed:
    """The output of the network for images.

    Attributes:
        image_BCHW: (B, 3, H, W) fp32 reconstructions in [0, 1], not clamped.
        mean_BChw: (B, C, h, w) fp32 means of the latents, before the scaling factor.
        std_BChw: (B, C, h, w) fp32 standard deviations of the latents.
        kl_B: (B,) fp32 divergence from the standard normal distribution, summed over a sample's latents.
    """

    image_BCHW: Tensor
    mean_BChw: Tensor
    std_BChw: Tensor
    kl_B: Tensor


class KLNetwork(BlockNetwork, AutoencoderKL):
    """Diffusers' `AutoencoderKL`, whose units are the levels of encoder and decoder, with their names and config."""

    def units(self) -> list[list[nn.Module]]:
        """Return the levels, in execution order, one each."""
        encoder, decoder = self.encoder, self.decoder
        levels = [*encoder.down_blocks, encoder.mid_block, decoder.mid_block, *decoder.up_blocks]
        return [[level] for level in levels]

    def encoder_modules(self) -> list[nn.Module]:
        """Return the modules from image to latent."""
        return [self.encoder, self.quant_conv]

    def decoder_modules(self) -> list[nn.Module]:
        """Return the modules from latent to image."""
        return [self.post_quant_conv, self.decoder]

    def forward(self, sample: Tensor, *, normal_BChw: Tensor | None = None, only: str | None = None) -> Any:
        """Encode, draw latents and decode; everything through `forward`, so that a sharded network is gathered.

        `sample` is (B, 3, H, W) float in [0, 1], `normal_BChw` (B, C, h, w) standard normal for the draw; None = the
        latents' means. Returns a `Reconstructed`; with `only="encode"` the means (B, C, h, w) alone, with "decode"
        images (B, 3, H, W) fp32 of latents (B, C, h, w).
        """
        if only == "decode":
            return self._images_of(sample)
        dtype = self.encoder.conv_in.weight.dtype
        moments = self.quant_conv(self.encoder((2 * sample - 1).to(dtype)))
        posterior = DiagonalGaussianDistribution(moments.float())
        mean_BChw, std_BChw = posterior.mean.clone(), posterior.std  # a clone, since FSDP warns of views
        if only == "encode":
            return mean_BChw
        image_BCHW = self._images_of(mean_BChw if normal_BChw is None else mean_BChw + std_BChw * normal_BChw)
        return Reconstructed(image_BCHW=image_BCHW, mean_BChw=mean_BChw, std_BChw=std_BChw, kl_B=posterior.kl())

    def _images_of(self, latent_BChw: Tensor) -> Tensor:
        latent_BChw = latent_BChw.to(self.post_quant_conv.weight.dtype)
        return (self.decoder(self.post_quant_conv(latent_BChw)).float() + 1) / 2
