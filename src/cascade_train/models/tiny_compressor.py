"""Latents without training: low frequencies of square patches in a luma and chroma basis.

Lives here: the transform; compressor and previewer of the tiny Stage C, which are each other's exact transpose; and
the tiny Stage A, of finer patches. Must not live here: trained ones (semantic_compressor.py, previewer.py,
latent_codec.py).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cascade_train.models.latent_codec import LatentCodec
from cascade_train.models.previewer import Previewer
from cascade_train.models.semantic_compressor import SemanticCompressor

PATCH = 32
"""Side of a patch in pixels: the stride of the latent, as of the trained compressor."""

COLOURS = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (0.5, 0.5, -1.0))
"""Luma, red against green, yellow against blue; normalised to unit length below."""

Frequencies = tuple[tuple[tuple[int, int], ...], ...]
Scales = tuple[tuple[float, ...], ...]

FREQUENCIES: Frequencies = (
    ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
    ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0)),
    ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0)),
)
"""Cosine frequencies (vertical, horizontal) kept of each colour axis: 16 channels in all."""

SCALES: Scales = (
    (12.0, 1.0, 1.0, 0.5, 1.2, 1.2),
    (7.5, 0.6, 0.6, 0.8, 0.8),
    (9.0, 0.8, 0.8, 0.9, 0.9),
)
"""Standard deviation of each coefficient above over the patches of the shapes pictures at 96 px, rounded up."""


FINE_PATCH = 4
"""Side of a patch of the tiny Stage A in pixels: the stride of the trained one."""

FINE_FREQUENCIES: Frequencies = (((0, 0), (0, 1)), ((0, 0),), ((0, 0),))
"""Four channels: the mean of each colour axis, and how luma changes from left to right."""

FINE_SCALES: Scales = ((1.6, 0.1), (1.0,), (1.2,))
"""Standard deviation of each of them over the patches of the shapes pictures at 96 px, rounded up."""


def patch_basis(
    patch: int = PATCH, frequencies: Frequencies = FREQUENCIES, scales: Scales = SCALES
) -> tuple[Tensor, Tensor]:
    """Return the orthonormal basis (C, 3, patch, patch) and the scale (C,) of each coefficient."""
    position = (torch.arange(patch, dtype=torch.float64) + 0.5) * math.pi / patch
    wave = [torch.cos(k * position) * math.sqrt((1 if k == 0 else 2) / patch) for k in range(3)]
    rows: list[Tensor] = []
    for colour, kept in zip(COLOURS, frequencies, strict=True):
        unit = torch.tensor(colour, dtype=torch.float64)
        unit = unit / unit.norm()
        rows += [torch.einsum("c,h,w->chw", unit, wave[vertical], wave[horizontal]) for vertical, horizontal in kept]
    return torch.stack(rows).float(), torch.tensor([scale for of_colour in scales for scale in of_colour])


class PatchCosines(nn.Module):
    """The linear map between images in [0, 1] and latents of about unit variance; has buffers only.

    Args:
        patch: side of a patch in pixels, the stride.
        frequencies: cosine frequencies kept of each colour axis.
        scales: what each coefficient is divided by.
    """

    def __init__(self, patch: int = PATCH, frequencies: Frequencies = FREQUENCIES, scales: Scales = SCALES) -> None:
        super().__init__()
        self.patch = patch
        basis, scale = patch_basis(patch, frequencies, scales)
        self.register_buffer("analysis", basis / scale.view(-1, 1, 1, 1), persistent=False)
        self.register_buffer("synthesis", basis * scale.view(-1, 1, 1, 1), persistent=False)

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to latents (B, C, H / patch, W / patch)."""
        return nn.functional.conv2d(image_BCHW - 0.5, self.analysis, stride=self.patch)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Map latents (B, C, H, W) to the images (B, 3, patch H, patch W) whose latents they are."""
        return nn.functional.conv_transpose2d(latent_BCHW, self.synthesis, stride=self.patch) + 0.5


class TinyCompressor(SemanticCompressor):
    """Keeps 16 low-frequency coefficients of each 32 x 32 patch. Needs no weights."""

    latent_channels = 16
    stride = PATCH

    def build(self, *, device: torch.device) -> None:
        """Make the transform on `device`."""
        self.module = PatchCosines().to(device).eval()

    @torch.no_grad()
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to (B, 16, H / 32, W / 32) fp32.

        Raises:
            ValueError: a side that is not a multiple of 32.
        """
        if image_BCHW.shape[-2] % PATCH or image_BCHW.shape[-1] % PATCH:
            raise ValueError(f"image of {tuple(image_BCHW.shape[-2:])} pixels: both sides must be multiples of {PATCH}")
        return self.module.encode(image_BCHW.float())


class TinyPreviewer(Previewer):
    """The transpose of `TinyCompressor`: shows colours and coarse shapes at full image size. Needs no weights."""

    scale = PATCH

    def build(self, *, device: torch.device) -> None:
        """Make the transform on `device`."""
        self.module = PatchCosines().to(device).eval()

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode (B, 16, H, W) to (B, 3, 32 H, 32 W) fp32, not clamped."""
        return self.module.decode(latent_BCHW.float())


class TinyCodec(LatentCodec):
    """Keeps the mean colour and one slope of each 4 x 4 patch. Needs no weights."""

    latent_channels = 4
    stride = FINE_PATCH

    def build(self, *, device: torch.device) -> None:
        """Make the transform on `device`."""
        self.module = PatchCosines(FINE_PATCH, FINE_FREQUENCIES, FINE_SCALES).to(device).eval()

    @torch.no_grad()
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to (B, 4, H / 4, W / 4) fp32; sides are multiples of 4."""
        return self.module.encode(image_BCHW.float())

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode (B, 4, H, W) to (B, 3, 4 H, 4 W) fp32, not clamped."""
        return self.module.decode(latent_BCHW.float())
