"""The KL autoencoder of latent diffusion: frozen, as a stage that trains, and its files.

Must not live here: its losses (tasks/autoencoder_kl.py), and the network as it trains (networks/kl_network.py).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.files.untrusted import stored_mapping
from cascade_train.models.formats.export import module_around, reconstruction, save_model
from cascade_train.models.formats.weights import put_tensors, read_belonging, replace_parts
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.frozen_part import LatentCodec
from cascade_train.models.initialize import initialise, torch_rule
from cascade_train.models.stage import AutoencoderStage, Images, Save
from cascade_train.options import File, Positive, check_blocks, check_fields

log = logging.getLogger(__name__)

VAE = ("first_stage_model.", "vae.")
"""Beginnings of the names of an autoencoder's tensors in a file of a whole model."""

_RENAMED = ((".query.", ".to_q."), (".key.", ".to_k."), (".value.", ".to_v."), (".proj_attn.", ".to_out.0."))
"""An autoencoder's attention in older folders of diffusers."""


@dataclass(kw_only=True, eq=False)
class KLOptions:
    """Options of a KL autoencoder, named as diffusers names them.

    Args:
        scaling_factor: what latents are multiplied by.
        latent_channels: channels of the latent.
        block_out_channels: width of each level; the stride is 2 to the power of one less than their number.
        layers_per_block: residual blocks of each level.
        norm_num_groups: groups of every norm.
    """

    scaling_factor: Positive[float]
    latent_channels: int
    block_out_channels: list[int]
    layers_per_block: int
    norm_num_groups: int

    def kl_arguments(self, *, key: str) -> dict[str, Any]:
        """Return the arguments of diffusers' `AutoencoderKL`; ValueErrors name `key`."""
        widths, groups = self.block_out_channels, self.norm_num_groups
        check_blocks(f"{key}.layers_per_block", self.layers_per_block)
        check_fields(self, f"{key}.")
        if any(width % groups for width in widths):
            raise ValueError(f"{key}.norm_num_groups={groups}: must divide the widths {widths}")
        return {
            **{field.name: getattr(self, field.name) for field in fields(KLOptions)},
            "down_block_types": ["DownEncoderBlock2D"] * len(widths),
            "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        }


@dataclass(kw_only=True, eq=False)
class KLAutoencoder(KLOptions, LatentCodec):
    """Diffusers' `AutoencoderKL`, frozen (Rombach et al. 2022, section 3.1).

    Args:
        weights: folder of diffusers or hub id, a pipeline's or its own; a run; or a single file, of diffusers' names or
            the original's, with other parts in it or without; null = values from a fixed seed.
        precision: "auto" = that of frozen modules, "fp32" = always fp32. That of XL needs fp32 or bf16: in fp16 it
            overflows.
        sample_posterior: whether training draws latents from the distribution; false = takes its mean.
        shift_factor: what is subtracted from latents before they are scaled; null = nothing.
        use_quant_conv: whether a convolution follows the encoder and another one precedes the decoder.

    Raises:
        ValueError: a scaling factor that is not above 0, or widths that do not divide into groups.
    """

    key = "vae"
    folder = "vae"

    weights: File[str | None]
    precision: Literal["auto", "fp32"]
    sample_posterior: bool
    shift_factor: float | None = None
    use_quant_conv: bool = True

    def __post_init__(self) -> None:
        convolutions = dict.fromkeys(("use_quant_conv", "use_post_quant_conv"), self.use_quant_conv)
        self.arguments = {**self.kl_arguments(key=self.key), "shift_factor": self.shift_factor, **convolutions}
        self.stride = 2 ** (len(self.block_out_channels) - 1)

    def build(self, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Make the module on `device` with its weights, or values from a fixed seed; a ConfigError if they do not fit.

        `dtype` is that of frozen modules, for `precision` auto.
        """
        super().build(device=device, dtype=torch.float32 if self.precision == "fp32" else dtype)

    def _load(self, module: nn.Module, weights: str, **where: Any) -> None:
        fill_vae(module, weights, self.arguments, **where)
        self._compare_scale(weights, where["key"])

    def _compare_scale(self, weights: str, key: str) -> None:
        """Warn where the configuration beside the weights names another scale: nothing else would show it."""
        config = stored_mapping(find_weight_files(weights, key=key, part=self.folder)[0].parent / "config.json")
        for name in ("scaling_factor", "shift_factor"):
            stored, ours = config.get(name), getattr(self, name) or 0.0
            if isinstance(stored, float) and abs(stored - ours) > 1e-4 * abs(stored):
                log.warning(
                    "%s=%s: was made for model.vae.%s=%g, and %g counts here. Set the one that the network is trained "
                    "with.",
                    *(key, weights, name, stored, ours),
                )

    def _make(self) -> tuple[nn.Module, float]:
        return plain_vae(self.arguments, None), 1.0

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


@dataclass(kw_only=True, eq=False)
class VAEStage(KLOptions, AutoencoderStage):
    """Diffusers' `AutoencoderKL` (Rombach et al. 2022, section 3.1). It has no captions, and denoises nothing.

    Args:
        weights: folder of diffusers or hub id, a pipeline's or its own; a run; or a single file, of diffusers' names or
            the original's, with other parts in it or without; null = from scratch.
        scaling_factor: what latents are multiplied by for the model that is trained on them; written into the export.

    Raises:
        ValueError: an image size that does not divide, a scaling factor that is not above 0, or widths that do not
            divide into groups.
    """

    name = "vae"
    abilities = frozenset({"kl_autoencoder"})
    part = "vae"
    latent_name = "latent"

    def __post_init__(self) -> None:
        self.arguments = self.kl_arguments(key="model")
        self.image_multiple = 2 ** (len(self.block_out_channels) - 1)
        self._check_image_size("the stride of the autoencoder")

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the network on the meta device, then load or initialise it on `device`."""
        from cascade_train.models.networks.kl_network import KLNetwork  # heavy: diffusers

        with torch.device("meta"):
            network = KLNetwork(**self.arguments)
        if self.weights is None:
            initialise(network, torch_rule(network), device=device, dtype=network_dtype, seed=self.seed)
        else:
            fill_vae(network, self.weights, self.arguments, key="model.weights", device=device, dtype=network_dtype)
        self.network = network.train()

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to the means of the latents, (B, C, H / stride, W / stride) fp32."""
        return self.scaling_factor * self.network(images, only="encode")

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W) to (B, 3, stride H, stride W) fp32 in [0, 1]."""
        return self.network(latent_BCHW / self.scaling_factor, only="decode").clamp(0, 1)

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network, see `block_network.set_attention`."""
        self.network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the levels in backward instead of keeping their activations."""
        self.network.set_recomputing(enabled)

    def exports(self) -> Mapping[str, Save]:
        """Return `vae`, a folder that diffusers loads."""
        return {self.part: self._save}

    def _save(self, state: Mapping[str, Tensor], directory: Path) -> float:
        return save_model(plain_vae(self.arguments, state), directory, reconstruction)


def plain_vae(arguments: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> Any:
    """Return diffusers' `AutoencoderKL` around `state`, sharing its memory; None = on the meta device."""
    from diffusers import AutoencoderKL  # heavy

    return module_around(lambda: AutoencoderKL(**arguments), state)


def converter(name: str) -> Callable[..., dict[str, Any]]:
    """Return diffusers' function of this name that renames the original code's tensors."""
    from diffusers.loaders import single_file_utils  # heavy

    found: Callable[..., dict[str, Any]] = getattr(single_file_utils, name)
    return found


def fill_vae(
    module: nn.Module, source: str, config: Mapping[str, Any], *, key: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Load an autoencoder of this diffusers config in place, from the meta device; a ConfigError names `key`."""
    put_tensors(module, read_vae(source, config, key=key), dtype=dtype, device=device, origin=f"{key}={source}")


def read_vae(source: str, config: Mapping[str, Any], *, key: str) -> dict[str, Tensor]:
    """Return the tensors of an autoencoder of this diffusers config, under its names; `key` is for messages."""
    stored = read_belonging(source, key, "vae", lambda name: name.startswith(VAE))
    if not any("encoder.down." in name for name in stored):
        return {replace_parts(name, _RENAMED): tensor for name, tensor in stored.items()}
    return converter("convert_ldm_vae_checkpoint")(stored, config)
