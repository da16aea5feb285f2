"""Stage B: the latents of Stage A from semantic latents and text.

Lives here: how images and captions become latents and conditions. Must not live here: the modules, and what trains.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.batch import Batch
from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.latent_codec import LatentCodec
from cascade_train.models.semantic_compressor import SemanticCompressor
from cascade_train.models.stage import Conditions, Images, Tokens, product
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.options import File

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The random choices about the semantic latents of a training batch.

    Attributes:
        sizes: of each image in front of the compressor.
        noise_BCHW: fp32 standard normal on the host, at the latents of images that do not shrink; smaller latents get
            its first rows and columns. None = no noise.
    """

    sizes: Sequence[Size]
    noise_BCHW: Tensor | None = None


class StageB(DenoisingStage):
    """Stage B of Stable Cascade, at any size.

    In training the semantic latents are those of a shrunken image (nearest neighbours), so that the network learns to
    decode latents of any resolution. Each sample has a factor of its own, where the original draws one for a batch.

    Args:
        shrink_range: smallest and largest factor by which images shrink in front of the compressor, in (0, 1].
        semantic_noise: standard deviation of the noise on semantic latents in training, so that the network tolerates
            errors of Stage C (Ho et al. 2022, section 4.2); 0 = none, as in the original.
        semantic_compressor: images to the semantic latents that are a condition.
        stage_a: images to the latents that are modelled, and back.

    Raises:
        ValueError: factors or noise out of range.
    """

    name = "stage_b"
    part = "decoder"
    image_keep_prob = 0.9
    guidance_scale = 1.1
    needs_image = True
    latent_name = "vq_latent"
    why_not_cached = (
        "its semantic latents are those of images that shrink by chance; model.shrink_range=[1.0,1.0] leaves them alone"
    )

    def __init__(
        self,
        *,
        image_size: int,
        precision: Literal["bf16", "fp32"],
        seed: int,
        random_encoders: bool,
        weights: File[str | None],
        shrink_range: list[float],
        semantic_noise: float = 0.0,
        network: CascadeUNetConfig,
        text_encoder: TextEncoder,
        semantic_compressor: SemanticCompressor,
        stage_a: LatentCodec,
    ) -> None:
        if len(shrink_range) != 2 or not 0.0 < shrink_range[0] <= shrink_range[1] <= 1.0:
            raise ValueError(
                f"model.shrink_range={shrink_range}: give the smallest and the largest factor, between 0 and 1, "
                "as in [0.5, 1.0]"
            )
        if semantic_noise < 0.0:
            raise ValueError(f"model.semantic_noise={semantic_noise}: is a standard deviation, give 0 or more")
        self.shrink_range = shrink_range
        self.semantic_noise = semantic_noise
        self.stage_a = stage_a
        if min(shrink_range) == 1.0:
            self.image_products = {"vq_latent": "stage_a", "effnet": "semantic_compressor"}
            self.caption_products = {"clip_text_pooled": "text_encoder"}
        widths = (
            ("in_channels", "stage_a.latent_channels", stage_a.latent_channels),
            ("effnet_in_channels", "semantic_compressor.latent_channels", semantic_compressor.latent_channels),
            ("clip_text_pooled_in_channels", "text_encoder.projection_dim", text_encoder.projection_dim),
        )
        super().__init__(
            {"stage_a": stage_a},
            widths,
            image_size=image_size,
            precision=precision,
            seed=seed,
            random_encoders=random_encoders,
            weights=weights,
            network=network,
            text_encoder=text_encoder,
            semantic_compressor=semantic_compressor,
        )

    def encode(self, images: Images) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to latents x0 (B, 4, H / 4, W / 4) fp32, or return cached ones."""
        return product(images, "vq_latent", self.stage_a.encode)

    @torch.no_grad()
    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return `vq_latent` (B, 4, H / 4, W / 4) and `effnet` (B, 16, H / 32, W / 32) fp32, of images as they are."""
        return {"vq_latent": self.stage_a.encode(image_BCHW), "effnet": self.semantic_compressor.encode(image_BCHW)}

    def draw(self, batch: Batch) -> Drawn:
        """Draw to which multiple of the compressor's stride each image shrinks, and its latents' noise."""
        low, high = self.shrink_range
        height, width = self._sides(batch)
        factors_B = low + (high - low) * batch.uniform("shrink")
        sizes = [self.shrunken(height, width, factor) for factor in factors_B.tolist()]
        if self.semantic_noise == 0.0:
            return Drawn(sizes=sizes)
        stride = self.semantic_compressor.stride
        shape = (self.semantic_compressor.latent_channels, -(-height // stride), -(-width // stride))
        return Drawn(sizes=sizes, noise_BCHW=batch.normal("semantic_noise", shape))

    def _sides(self, batch: Batch) -> Size:
        if batch.image_BCHW is not None:
            height, width = batch.image_BCHW.shape[-2:]
            return height, width
        rows, columns = batch.tensors[self.latent_name].shape[-2:]
        return rows * self.stage_a.stride, columns * self.stage_a.stride

    def shrunken(self, height: int, width: int, factor: float) -> Size:
        """Return the size of an image of `height` x `width` pixels that shrinks by `factor`."""
        stride = self.semantic_compressor.stride
        rows, columns = (max(1, int(side * factor // stride)) * stride for side in (height, width))
        return rows, columns

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Drawn | None = None,
    ) -> Conditions:
        """Encode captions and images to `clip_text_pooled` (B, 1, D) and `effnet` (B, 16, H', W').

        `effnet` is zeros without images, and for samples that do not keep theirs. Images may be given as their semantic
        latents by the name `effnet`, cached or Stage C's. Without `drawn`, images do not shrink and there is no noise.
        """
        pooled = self._encode_text(tokens)["clip_text_pooled"]
        if images is None:
            zeros = pooled.new_zeros(len(pooled), self.semantic_compressor.latent_channels, 1, 1)
            return {"clip_text_pooled": pooled, "effnet": zeros}
        if isinstance(images, Tensor):
            effnet = self._semantic_latents(images, drawn)
        else:
            effnet = self._noised(images["effnet"], slice(None), drawn)
        if keep_image_B is not None:
            effnet = effnet * keep_image_B[:, None, None, None].to(effnet.dtype)
        return {"clip_text_pooled": pooled, "effnet": effnet}

    def _semantic_latents(self, image_BCHW: Tensor, drawn: Drawn | None) -> Tensor:
        """Encode each image at its size, and bring latents of several sizes to the network's resolution.

        That is what the network itself does with latents of one size, so neighbours do not change a sample.
        """
        if drawn is None:
            return self.semantic_compressor.encode(image_BCHW)
        latents: dict[int, Tensor] = {}
        for size in dict.fromkeys(drawn.sizes):
            members = [i for i, other in enumerate(drawn.sizes) if other == size]
            images = torch.cat([image_BCHW[i : i + 1] for i in members])
            encoded = self.semantic_compressor.encode(functional.interpolate(images, size, mode="nearest"))
            latents |= dict(zip(members, self._noised(encoded, members, drawn).split(1), strict=True))
        if len(set(drawn.sizes)) > 1:
            _, height, width = self.latent_shape(*image_BCHW.shape[-2:])
            patch = self.network_config.arguments["patch_size"]
            target = (height // patch, width // patch)
            latents = {
                i: functional.interpolate(latent, target, mode="bilinear", align_corners=True)
                for i, latent in latents.items()
            }
        return torch.cat([latents[i] for i in range(len(drawn.sizes))])

    def _noised(self, latent_BCHW: Tensor, members: list[int] | slice, drawn: Drawn | None) -> Tensor:
        """Add each member's own noise to its latents."""
        if drawn is None or drawn.noise_BCHW is None:
            return latent_BCHW
        height, width = latent_BCHW.shape[-2:]
        noise_BCHW = drawn.noise_BCHW[members, :, :height, :width].to(latent_BCHW.device, non_blocking=True)
        return latent_BCHW + self.semantic_noise * noise_BCHW

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        stride = self.stage_a.stride
        return self.stage_a.latent_channels, -(-height // stride), -(-width // stride)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents to images, (B, 3, 4 H, 4 W) fp32 in [0, 1], without gradient."""
        return self.stage_a.decode(latent_BCHW).clamp(0, 1)
