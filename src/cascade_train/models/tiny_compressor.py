"""A semantic compressor without training: low frequencies of 32 x 32 patches in a luma and chroma basis.

Lives here: the transform, and the compressor and previewer components of the tiny stage, which are each other's exact
transpose. Must not live here: trained compressors (semantic_compressor.py, previewer.py).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cascade_train.models.previewer import Previewer
from cascade_train.models.semantic_compressor import SemanticCompressor

PATCH = 32
"""Side of a patch in pixels: the stride of the latent, as of the trained compressor."""

COLOURS = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (0.5, 0.5, -1.0))
"""Luma, red against green, yellow against blue; normalised to unit length below."""

FREQUENCIES = (
    ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
    ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0)),
    ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0)),
)
"""Cosine frequencies (vertical, horizontal) kept of each colour axis: 16 channels in all."""

SCALES = (
    (12.0, 1.0, 1.0, 0.5, 1.2, 1.2),
    (7.5, 0.6, 0.6, 0.8, 0.8),
    (9.0, 0.8, 0.8, 0.9, 0.9),
)
"""Standard deviation of each coefficient above over the patches of the shapes pictures at 96 px, rounded up."""


def patch_basis() -> tuple[Tensor, Tensor]:
    """Return the orthonormal basis (16, 3, 32, 32) and the scale (16,) of each coefficient."""
    position = (torch.arange(PATCH, dtype=torch.float64) + 0.5) * math.pi / PATCH
    wave = [torch.cos(k * position) * math.sqrt((1 if k == 0 else 2) / PATCH) for k in range(3)]
    rows: list[Tensor] = []
    scales: list[float] = []
    for colour, kept, scale in zip(COLOURS, FREQUENCIES, SCALES, strict=True):
        unit = torch.tensor(colour, dtype=torch.float64)
        unit = unit / unit.norm()
        for vertical, horizontal in kept:
            rows.append(torch.einsum("c,h,w->chw", unit, wave[vertical], wave[horizontal]))
        scales += scale
    return torch.stack(rows).float(), torch.tensor(scales)


class PatchCosines(nn.Module):
    """The linear map between images in [0, 1] and latents of about unit variance; has buffers only."""

    def __init__(self) -> None:
        super().__init__()
        basis, scale = patch_basis()
        self.register_buffer("analysis", basis / scale.view(-1, 1, 1, 1), persistent=False)
        self.register_buffer("synthesis", basis * scale.view(-1, 1, 1, 1), persistent=False)

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to latents (B, 16, H / 32, W / 32)."""
        return nn.functional.conv2d(image_BCHW - 0.5, self.analysis, stride=PATCH)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Map latents (B, 16, H, W) to the images (B, 3, 32 H, 32 W) whose latents they are."""
        return nn.functional.conv_transpose2d(latent_BCHW, self.synthesis, stride=PATCH) + 0.5


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
