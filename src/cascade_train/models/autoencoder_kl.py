"""The KL autoencoder of latent diffusion: images to latents, as a normal distribution, and back.

Must not live here: the draw from the distribution (a stage's).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.files.untrusted import stored_mapping
from cascade_train.models.formats.autoencoder_kl import read_vae
from cascade_train.models.formats.weights import put_tensors
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.frozen_part import LatentCodec
from cascade_train.models.initialize import FROZEN_SEED, convolution_rule, initialise
from cascade_train.options import File, check_blocks

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class KLAutoencoder(LatentCodec):
    """Diffusers' `AutoencoderKL`, frozen (Rombach et al. 2022, section 3.1). Options are named as diffusers names them.

    Args:
        weights: folder of diffusers or hub id, a pipeline's or its own; a run; or a single file, of diffusers' names or
            the original's, with other parts in it or without; null = values from a fixed seed.
        precision: "auto" = that of frozen modules, "fp32" = always fp32. That of XL needs fp32 or bf16: in fp16 it
            overflows.
        sample_posterior: whether training draws latents from the distribution; false = takes its mean.
        scaling_factor: what latents are multiplied by.
        shift_factor: what is subtracted from them before; null = nothing.
        use_quant_conv: whether a convolution follows the encoder and another one precedes the decoder.
        latent_channels: channels of the latent.
        block_out_channels: width of each level; the stride is 2 to the power of one less than their number.
        layers_per_block: residual blocks of each level.
        norm_num_groups: groups of every norm.

    Raises:
        ValueError: a scaling factor that is not above 0, or widths that do not divide into groups.
    """

    key = "vae"
    folder = "vae"

    weights: File[str | None]
    precision: Literal["auto", "fp32"]
    sample_posterior: bool
    scaling_factor: float
    latent_channels: int
    block_out_channels: list[int]
    layers_per_block: int
    norm_num_groups: int
    shift_factor: float | None = None
    use_quant_conv: bool = True

    def __post_init__(self) -> None:
        convolutions = dict.fromkeys(("use_quant_conv", "use_post_quant_conv"), self.use_quant_conv)
        self.arguments = {**kl_arguments(self, key=self.key), "shift_factor": self.shift_factor, **convolutions}
        self.stride = 2 ** (len(self.block_out_channels) - 1)

    def build(self, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Make the module on `device` with its weights, or values from a fixed seed; a ConfigError if they do not fit.

        `dtype` is that of frozen modules, for `precision` auto.
        """
        dtype = torch.float32 if self.precision == "fp32" else dtype
        with torch.device("meta"):
            module, gain = self._make()
        if self.weights is None:
            initialise(module, convolution_rule(gain), device=device, dtype=dtype, seed=FROZEN_SEED)
        else:
            key = "model.vae.weights"
            values = read_vae(self.weights, self.arguments, key=key)
            self._compare_scale(self.weights, key)
            put_tensors(module, values, dtype=dtype, device=device, origin=f"{key}={self.weights}")
        self.module = module.eval().requires_grad_(requires_grad=False)

    def _compare_scale(self, weights: str, key: str) -> None:
        """Warn where the configuration beside the weights names another scale: nothing else would show it."""
        path = find_weight_files(weights, key=key, part=self.folder)[0].parent / "config.json"
        config = stored_mapping(path)
        for name in ("scaling_factor", "shift_factor"):
            stored, ours = config.get(name), getattr(self, name) or 0.0
            if isinstance(stored, float) and abs(stored - ours) > 1e-4 * abs(stored):
                log.warning(
                    "%s=%s: was made for model.vae.%s=%g, and %g counts here. Set the one that the network is trained "
                    "with.",
                    *(key, weights, name, stored, ours),
                )

    def _make(self) -> tuple[nn.Module, float]:
        from diffusers import AutoencoderKL

        return AutoencoderKL(**self.arguments), 1.0

    @torch.no_grad()
    def posterior(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (B, 3, H, W) float in [0, 1] to mean and standard deviation of the latents, (B, C, ...) fp32 each."""
        found = self.module.encode((2 * image_BCHW - 1).to(self.module.dtype)).latent_dist
        mean_BCHW = found.mean.float() if self.shift_factor is None else found.mean.float() - self.shift_factor
        return self.scaling_factor * mean_BCHW, self.scaling_factor * found.std.float()

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to the mean of the latents, (B, C, H / stride, W / stride) fp32."""
        return self.posterior(image_BCHW)[0]

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode (B, C, H, W) to (B, 3, stride H, stride W) fp32, not clamped."""
        plain_BCHW = latent_BCHW / self.scaling_factor + (self.shift_factor or 0.0)
        return (self.module.decode(plain_BCHW.to(self.module.dtype)).sample.float() + 1) / 2


def kl_arguments(options: Any, *, key: str) -> dict[str, Any]:
    """Return the arguments of an `AutoencoderKL` among the attributes of an object; ValueErrors name `key`."""
    widths, groups = options.block_out_channels, options.norm_num_groups
    check_blocks(f"{key}.layers_per_block", options.layers_per_block)
    if not options.scaling_factor > 0.0:
        raise ValueError(f"{key}.scaling_factor={options.scaling_factor}: multiplies the latents, give one above 0")
    if any(width % groups for width in widths):
        raise ValueError(f"{key}.norm_num_groups={groups}: must divide the widths {widths}")
    own = ("scaling_factor", "latent_channels", "block_out_channels", "layers_per_block", "norm_num_groups")
    return {
        **{name: getattr(options, name) for name in own},
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }
