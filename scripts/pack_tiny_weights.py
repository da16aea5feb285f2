"""Put what the scripts tiny_cascade.sh and tiny_stable_diffusion.sh trained into the package, in half precision.

python scripts/pack_tiny_weights.py runs/tiny
python scripts/pack_tiny_weights.py runs/tiny_sd
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from cascade_train.models.formats.weights_source import CONFIG_FILES, PACKAGED, find_weight_files

CASCADE = {"vqgan": "a", "semantic_compressor": "compressor", "previewer": "compressor", "prior": "c", "decoder": "b"}
STABLE_DIFFUSION = {
    "sd/vae": "decoder",
    "sd/unet": "sd",
    "sd/text_encoder": "sd",
    "sdxl/unet": "sdxl",
    "sdxl/text_encoder": "sdxl",
    "sdxl/text_encoder_2": "sdxl",
}
"""Folder of a part -> the run that left the part."""

FAMILIES = ((CASCADE, 15_000_000), (STABLE_DIFFUSION, 6_000_000))
"""Parts, and how many bytes they may take together."""


def pack(part: str, run: Path, folder: Path) -> int:
    """Write one part's weights as fp16; return how many bytes they take.

    Raises:
        ValueError: a value beyond what fp16 holds.
    """
    (file,) = find_weight_files(str(run), part=Path(part).name)
    tensors = {}
    for name, value in load_file(file).items():
        half = value.half() if value.is_floating_point() else value
        if not half.isfinite().all():
            raise ValueError(f"{file}: {name} holds a value that fp16 does not")
        tensors[name] = half.contiguous()
    target = folder / part / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata={"format": "pt"})
    for beside in CONFIG_FILES if "text_encoder" in part else ():
        shutil.copy(file.parent / beside, target.parent)
    return target.stat().st_size


def main(argv: Sequence[str] | None = None) -> int:
    """Pack every part and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs a, compressor, b and c, or vae, sd and sdxl")
    parser.add_argument("--out", type=Path, default=PACKAGED["package:tiny"], help="folder of the parts")
    args = parser.parse_args(argv)
    parts, most = next(each for each in FAMILIES if all((args.runs / run).is_dir() for run in each[0].values()))
    sizes = {part: pack(part, args.runs / run, args.out) for part, run in parts.items()}
    for part, size in sizes.items():
        print(f"{part}: {size / 1e6:.2f} MB")
    print(f"together: {sum(sizes.values()) / 1e6:.2f} MB")
    return int(sum(sizes.values()) > most)


if __name__ == "__main__":
    sys.exit(main())
