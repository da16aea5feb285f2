"""The original's data path, rebuilt from its description to be measured beside ours.

PIL decodes and a float32 tensor of the whole picture is made in the worker. With several aspect ratios it crosses
the queue, and the main process resizes it with antialiasing, crops it, and stacks a bucket's pictures; with one, the
worker resizes (Stable Cascade, DataCore and Bucketeer; a plain middle crop stands for its saliency network).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import functional as transforms

Size = tuple[int, int]


def to_float(encoded: bytes) -> Tensor:
    """Decode as its workers do: (3, H, W) float32 in [0, 1] of the whole picture."""
    return transforms.to_tensor(Image.open(io.BytesIO(encoded)).convert("RGB"))


def fit(image: Tensor, size: Size) -> Tensor:
    """Resize until the size is covered, with antialiasing, and crop the middle, as its main process does."""
    scale = max(wanted / side for wanted, side in zip(size, image.shape[1:], strict=True))
    covering = [max(wanted, round(side * scale)) for wanted, side in zip(size, image.shape[1:], strict=True)]
    return transforms.center_crop(transforms.resize(image, covering, antialias=True), list(size))


def bucketed(tar: Path, size: Size, batch_size: int, workers: int) -> Iterator[Tensor]:
    """Yield float32 batches of a tar, endlessly, as with several aspect ratios: the main process resizes."""
    bucket: list[Tensor] = []
    for samples in _loader(tar, transforms.to_tensor, batch_size, workers):
        for image, _ in samples:
            bucket.append(fit(image, size))
            if len(bucket) == batch_size:
                yield torch.stack(bucket)
                bucket = []


def square(tar: Path, size: Size, batch_size: int, workers: int) -> Iterator[Tensor]:
    """Yield float32 batches of a tar, endlessly, as with one aspect ratio: the workers resize."""

    def transformed(image: Image.Image) -> Tensor:
        return fit(transforms.to_tensor(image), size)

    for samples in _loader(tar, transformed, batch_size, workers):
        yield torch.stack([image for image, _ in samples])


def _loader(tar: Path, transform: Callable[[Image.Image], Tensor], batch_size: int, workers: int) -> DataLoader[Any]:
    import webdataset

    dataset = (
        webdataset.WebDataset(str(tar), resampled=True, shardshuffle=False)
        .decode("pilrgb")
        .to_tuple("jpg", "txt")
        .map_tuple(transform, _unchanged)
    )
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=_unchanged)


def _unchanged(value: Any) -> Any:
    return value
