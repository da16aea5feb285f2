"""Stage B: the latents of Stage A from semantic latents and text.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.batch import Batch
from cascade_train.models.cascade.stage_c import CascadeStage
from cascade_train.models.control import Conditions
from cascade_train.models.frozen_part import LatentCodec
from cascade_train.models.stage import Images, Save, Tokens, to_device

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The random choices about the semantic latents of a training batch.

    Attributes:
        sizes: of each image in front of the compressor.
        noise_BCHW: fp32 standard normal on the host, as large as latents of unshrunken images; smaller latents get its
            first rows and columns. None = no noise.
    """

    sizes: Sequence[Size]
    noise_BCHW: Tensor | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class StageB(CascadeStage):
    """Stage B of Stable Cascade, at any size.

    In training the semantic latents are those of a shrunken image (nearest neighbours), so that the network learns to
    decode latents of any resolution. Each sample has a factor of its own, where the original draws one for a batch.

    Args:
        shrink_range: smallest and largest factor by which images shrink in front of the compressor, in (0, 1].
        semantic_noise: standard deviation of the noise on semantic latents in training, so that the network tolerates
            errors of Stage C (Ho et al. 2022, section 4.2); 0 = none, as in the original.
        semantic_compressor: images to the semantic latents that are a condition.
        stage_a: images to the latents that are modelled, and back.
    """

    name = "stage_b"
    abilities = frozenset({"denoising", "reconstruction"})
    part = "decoder"
    frozen_parts = ("text_encoder", "semantic_compressor", "stage_a")
    widths = (
        ("in_channels", "stage_a", "latent_channels"),
        ("effnet_in_channels", "semantic_compressor", "latent_channels"),
        ("clip_text_pooled_in_channels", "text_encoder", "projection_dim"),
    )
    encoded_by = decoded_by = "stage_a"
    image_keep_prob = 0.9
    guidance_scale = 1.1
    needs_image = True
    latent_name = "vq_latent"
    why_not_cached = (
        "its semantic latents are those of images that shrink by chance; model.shrink_range=[1.0,1.0] leaves them alone"
    )

    shrink_range: list[float]
    semantic_noise: float = 0.0
    stage_a: LatentCodec

    def __post_init__(self) -> None:
        shrink = self.shrink_range
        if len(shrink) != 2 or not 0.0 < shrink[0] <= shrink[1] <= 1.0:
            raise ValueError(
                f"model.shrink_range={shrink}: give the smallest and the largest factor, between 0 and 1, as in "
                "[0.5, 1.0]"
            )
        if self.semantic_noise < 0.0:
            raise ValueError(f"model.semantic_noise={self.semantic_noise}: is a standard deviation, give 0 or more")
        if min(shrink) == 1.0:
            self.image_products = {"vq_latent": "stage_a", "effnet": "semantic_compressor"}
            self.caption_products = {"clip_text_pooled": "text_encoder"}
        super().__post_init__()

    def decoded_multiples(self) -> tuple[int, int]:
        """Return the pixels of a position of the network, at its first and at its last level."""
        network = self.network_config.arguments
        first = self.stage_a.stride * network["patch_size"]
        return first, first * 2 ** (len(network["block_out_channels"]) - 1)

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
            effnet = effnet * to_device(keep_image_B, effnet.device)[:, None, None, None].to(effnet.dtype)
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
            target = (height // self.network_config.patch_size, width // self.network_config.patch_size)
            resize = partial(functional.interpolate, size=target, mode="bilinear", align_corners=True)
            latents = {i: resize(latent) for i, latent in latents.items()}
        return torch.cat([latents[i] for i in range(len(drawn.sizes))])

    def _noised(self, latent_BCHW: Tensor, members: list[int] | slice, drawn: Drawn | None) -> Tensor:
        if drawn is None or drawn.noise_BCHW is None:
            return latent_BCHW
        height, width = latent_BCHW.shape[-2:]
        noise_BCHW = drawn.noise_BCHW[members, :, :height, :width].to(latent_BCHW.device, non_blocking=True)
        return latent_BCHW + self.semantic_noise * noise_BCHW

    def exports(self) -> Mapping[str, Save]:
        """Return `decoder`, a folder that diffusers' decoder pipeline loads."""
        return {self.part: partial(self._pipelines().save_decoder, self)}
