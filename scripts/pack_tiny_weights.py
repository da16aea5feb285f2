"""Put what scripts/tiny_cascade.sh trained into the package, in half precision: the default of `model=*_tiny`.

python scripts/pack_tiny_weights.py runs/tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from cascade_train.models.formats.weights_source import PACKAGED, find_weight_files

RUNS = {"vqgan": "a", "semantic_compressor": "compressor", "previewer": "compressor", "prior": "c", "decoder": "b"}
"""Part -> the run that left it."""

MOST_BYTES = 15_000_000
"""Of all of them."""


def pack(part: str, run: Path, folder: Path) -> int:
    """Write one part's weights as fp16; return how many bytes they take.

    Raises:
        ValueError: a value beyond what fp16 holds.
    """
    (file,) = find_weight_files(str(run), part=part)
    tensors = {}
    for name, value in load_file(file).items():
        half = value.half() if value.is_floating_point() else value
        if not half.isfinite().all():
            raise ValueError(f"{file}: {name} holds a value that fp16 does not")
        tensors[name] = half.contiguous()
    target = folder / part / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata={"format": "pt"})
    return target.stat().st_size


def main(argv: Sequence[str] | None = None) -> int:
    """Pack every part and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs a, compressor, b and c")
    parser.add_argument("--out", type=Path, default=PACKAGED["package:tiny"], help="folder of the parts")
    args = parser.parse_args(argv)
    sizes = {part: pack(part, args.runs / run, args.out) for part, run in RUNS.items()}
    for part, size in sizes.items():
        print(f"{part}: {size / 1e6:.2f} MB")
    print(f"together: {sum(sizes.values()) / 1e6:.2f} MB")
    return int(sum(sizes.values()) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
