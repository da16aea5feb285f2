"""What fewer bits cost the frozen encoders: relative rms error of latents against float64, with seeded weights.

python bench/encoders.py --side 256
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from cascade_train.models.cascade.latent_codec import VQGAN
from cascade_train.models.cascade.semantic_compressor import IMAGENET_MEAN, IMAGENET_STD, EfficientNetCompressor

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def pictures(side: int) -> dict[str, Tensor]:
    """Return two pictures of noise, and two smooth ones."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(2, 3, side // 16, side // 16, generator=generator)
    smooth = nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    return {"noise": torch.rand(2, 3, side, side, generator=generator), "smooth": smooth}


def encoders() -> dict[str, nn.Module]:
    """Return the encoders of the published models, from images to latents."""
    host = torch.device("cpu")
    compressor = EfficientNetCompressor(weights=None)
    compressor.build(device=host)
    sizes = {"levels": 2, "bottleneck_blocks": 12, "embed_dim": 384, "latent_channels": 4, "num_vq_embeddings": 8192}
    codec = VQGAN(weights=None, scale_factor=0.43, **sizes)
    codec.build(device=host)
    return {"semantic_compressor": compressor.module, "stage_a": codec.module}


def encode(module: nn.Module, image_BCHW: Tensor) -> Tensor:
    """Return the latents of a picture in the dtype of the module."""
    if hasattr(module, "encode"):
        return module.encode(image_BCHW).latents
    mean, std = (torch.tensor(each).view(3, 1, 1).to(image_BCHW) for each in (IMAGENET_MEAN, IMAGENET_STD))
    return module((image_BCHW - mean) / std)


@torch.no_grad()
def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=256)
    side = parser.parse_args().side
    print(f"{'encoder':20s} {'pictures':8s} " + " ".join(f"{str(each)[6:]:>9s}" for each in FORMATS))
    for name, module in encoders().items():
        for kind, image_BCHW in pictures(side).items():
            exact = encode(module.double(), image_BCHW.double())
            module.float()
            errors = []
            for dtype in FORMATS:
                with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype,
                                    enabled=dtype != torch.float32):  # fmt: skip
                    off = encode(module, image_BCHW).double() - exact
                errors.append(float(off.square().mean().sqrt() / exact.square().mean().sqrt()))
            print(f"{name:20s} {kind:8s} " + " ".join(f"{each:9.1e}" for each in errors), flush=True)


if __name__ == "__main__":
    main()
