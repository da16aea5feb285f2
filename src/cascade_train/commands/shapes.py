"""Write the procedural pictures as webdataset tars.

    cascade-train shapes out=DIR

Each sample is KEY.png, KEY.txt, and KEY.json with the words of the scene. The same arguments write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cascade_train.commands.parts.command_line import Command
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import check_least


@dataclass(kw_only=True)
class ShapesArgs:
    """Write procedural captioned pictures as webdataset tars."""

    out: str
    """Folder to write into; made if missing, must hold no shards yet."""
    samples: int = 2000
    """How many pictures."""
    samples_per_shard: int = 500
    """Pictures in one tar."""
    image_size: int = 96
    """Side of a picture in pixels."""
    overwrite: bool = False
    """Replace tars of the same names."""
    seed: int = 0
    """Which pictures; another seed draws others."""


def write_shapes(args: ShapesArgs) -> list[Path]:
    """Write the tars `shapes-000000.tar`, ... into a folder without any, and return their paths."""
    from cascade_train.data import shapes as drawn  # heavy: numpy

    check_least("samples_per_shard", args.samples_per_shard, 1, "a tar holds that many pictures")
    try:
        source = drawn.Shapes(
            image_size=args.image_size,
            crop="center",
            shuffle_window_shards=1,
            num_workers=0,
            worker_start="fork",
            samples=args.samples,
            seed=args.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error).replace("data.", "")) from error
    return drawn.write_tars(source, Path(args.out), args.samples_per_shard, overwrite=args.overwrite)


def shapes(args: ShapesArgs) -> int:
    """Write the tars and print where they are; return 0."""
    try:
        paths = write_shapes(args)
    except OSError as error:
        raise RunError(f"out={args.out} cannot be written: {error}") from error
    print(f"{len(paths)} tars lie in {args.out}: {paths[0].name} to {paths[-1].name}")
    return 0


COMMAND = Command(arguments=ShapesArgs, run=shapes)
