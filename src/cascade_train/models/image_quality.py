"""How near a reconstruction comes to its original.

Shape legend: B batch, H W image size.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from cascade_train.errors import ConfigError


def check_installed() -> None:
    """Check that the library of metrics is there.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("torchmetrics") is None:
        raise ConfigError(
            "Reconstructions are measured by the library torchmetrics, which is not installed. Install it: "
            "pip install 'cascade-train[metrics]'."
        )


def image_quality(image_BCHW: Tensor, original_BCHW: Tensor) -> dict[str, Tensor]:
    """Return `psnr` in decibels and `ssim` (Wang et al. 2004) of each image, (B,) fp32; higher is better.

    Args:
        image_BCHW: (B, 3, H, W) float; counted within [0, 1].
        original_BCHW: (B, 3, H, W) float in [0, 1].
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    image_BCHW = image_BCHW.float().clamp(0, 1)
    error_B = (image_BCHW - original_BCHW).square().mean(dim=(1, 2, 3))
    ssim_B = structural_similarity_index_measure(image_BCHW, original_BCHW, data_range=1.0, reduction="none")
    return {"psnr": -10.0 * error_B.clamp(min=1e-10).log10(), "ssim": ssim_B.reshape(len(image_BCHW))}
