"""What control filters cost: milliseconds for each picture in a data worker and on the device, and what passes between.

python bench/filters.py --side 768 --device cpu
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cascade_train.batch import SampleTransform
from cascade_train.filters.base import ControlFilter, transform_images
from cascade_train.filters.canny import CannyFilter
from cascade_train.filters.inpaint import InpaintFilter, SaliencyNetwork
from cascade_train.filters.qr import BrightnessFilter
from cascade_train.filters.sketch import EdgeNetwork, SketchFilter
from cascade_train.filters.super_resolution import LatentSuperResolutionFilter, SuperResolutionFilter
from cascade_train.models.cascade.semantic_compressor import EfficientNetCompressor

HEAD = ("filter", "worker ms", "KiB sent", "device ms")


def filters(folder: Path) -> dict[str, ControlFilter]:
    """Return the filters with the numbers of conf/filter; networks have weights that no one trained."""
    torch.save(SaliencyNetwork().state_dict(), folder / "saliency.pt")
    torch.save(EdgeNetwork().state_dict(), folder / "edges.pt")
    inpaint = {"threshold": [0.04, 0.4], "p_outpaint": 0.4}
    widths = [0, 3, 5, 7, 9]
    return {
        "canny": CannyFilter(resize=224, low=100, high=200),
        "inpaint, random holes": InpaintFilter(weights=None, **inpaint),
        "inpaint, saliency": InpaintFilter(weights=str(folder / "saliency.pt"), **inpaint),
        "sr": SuperResolutionFilter(scale_factor=0.25),
        "sr_effnet": LatentSuperResolutionFilter(scale_factor=0.5),
        "qr": BrightnessFilter(resize=224, blobify=True, dilation_kernels=[3, 5, 7], blur_kernels=[15]),
        "sketch": SketchFilter(
            weights=str(folder / "edges.pt"), resize=224, dilation_kernels=widths, binarize=True, threshold=[0.05, 0.7]
        ),
    }


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of some runs, after one that does not count; of the CPU itself where it does the work."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    taken = []
    for _ in range(repeats + 1):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock() - start)
    return float(np.median(taken[1:]))


def worker_half(transform: SampleTransform, image_BCHW: Tensor) -> dict[str, Tensor]:
    """Run what data workers do, one picture after the other."""
    return transform_images(transform, image_BCHW, [torch.Generator().manual_seed(i) for i in range(len(image_BCHW))])


def photograph(side: int) -> bytes:
    """Return a JPEG of soft noise, about as large as a photograph's."""
    small = torch.rand(1, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.interpolate(small, size=(side, side), mode="bicubic").clamp(0, 1)[0]
    file = io.BytesIO()
    Image.fromarray((255 * image).byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(jpeg: bytes) -> np.ndarray:
    """Return a picture (3, H, W) uint8 as a worker's batch holds it."""
    return np.ascontiguousarray(np.asarray(Image.open(io.BytesIO(jpeg))).transpose(2, 0, 1))


def measure(side: int, batch: int, repeats: int, device: torch.device) -> list[tuple[str, float, float, float]]:
    """Return a row for each filter; the first is what a worker does for each picture anyhow."""
    jpeg = photograph(side)
    picture = decoded(jpeg)
    image_BCHW = torch.from_numpy(picture)[None].repeat(batch, 1, 1, 1)
    on_device_BCHW = image_BCHW.to(device).float() / 255
    compressor = EfficientNetCompressor(weights=None)
    compressor.build(device=device)
    decoding = seconds(lambda: decoded(jpeg), repeats * batch, device)
    rows = [("(decode a JPEG)", 1e3 * decoding, picture.nbytes / 1024, 0.0)]
    with tempfile.TemporaryDirectory() as folder:
        for name, found in filters(Path(folder)).items():
            transform = found.sample_transform()
            map_of = found.build(device=device, encode=compressor.encode)
            made = worker_half(transform, image_BCHW)
            sent = sum(value[0].nbytes for value in made.values()) / 1024
            made = {key: value.to(device) for key, value in made.items()}
            in_worker = seconds(lambda t=transform: worker_half(t, image_BCHW), repeats, device)
            on_device = seconds(lambda m=map_of, x=made: m(on_device_BCHW, x), repeats, device)
            rows.append((name, 1e3 * in_worker / batch, sent, 1e3 * on_device / batch))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--side", type=int, default=768, help="of the pictures, in pixels")
    parser.add_argument("--batch", type=int, default=4, help="pictures of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the median counts")
    parser.add_argument("--device", default="cpu", help="of the second half, cpu or cuda")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as in a data worker
    print(f"{given.side} px, batches of {given.batch}, one thread, device {given.device}, torch {torch.__version__}")
    print(f"{HEAD[0]:24}{HEAD[1]:>12}{HEAD[2]:>12}{HEAD[3]:>12}")
    for name, in_worker, sent, on_device in measure(given.side, given.batch, given.repeats, torch.device(given.device)):
        print(f"{name:24}{in_worker:12.2f}{sent:12.1f}{on_device:12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
