"""Write the procedural pictures as real webdataset tars.

    cascade-train shapes out=DIR [samples=2000] [samples_per_shard=500] [image_size=96] [seed=0]

Each sample is KEY.png (lossless), KEY.txt, and KEY.json with the words of the scene. The same arguments write
the same bytes.
"""

from __future__ import annotations

import io
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cascade_train.commands.arguments import parse_verb
from cascade_train.config.error_messages import exit_code
from cascade_train.data.shapes import Shapes
from cascade_train.data.tar.members import write_tar
from cascade_train.errors import ConfigError, RunError


@dataclass(kw_only=True)
class Arguments:
    """Write procedural captioned pictures as webdataset tars."""

    out: str
    """Folder to write into; made if missing, must hold no shards yet."""
    samples: int = 2000
    """How many pictures."""
    samples_per_shard: int = 500
    """Pictures in one tar."""
    image_size: int = 96
    """Side of a picture in pixels."""
    seed: int = 0
    """Which pictures; another seed draws others."""


def write_shapes(arguments: Arguments) -> list[Path]:
    """Write the tars `shapes-000000.tar`, ... and return their paths.

    Raises:
        ConfigError: the folder holds shards already, or a number is out of range.
    """
    if arguments.samples_per_shard < 1:
        raise ConfigError(
            f"samples_per_shard={arguments.samples_per_shard} must be at least 1: a tar holds that many pictures"
        )
    try:
        shapes = Shapes(
            image_size=arguments.image_size,
            crop="center",
            shuffle_window_shards=1,
            num_workers=0,
            worker_start="fork",
            samples=arguments.samples,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error).replace("data.", "")) from error
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("shapes-*.tar")):
        raise ConfigError(f"out={out} holds shapes-*.tar already: remove them or choose another folder")
    firsts = range(0, arguments.samples, arguments.samples_per_shard)
    return [
        write_tar(
            out / f"shapes-{i:06d}.tar",
            (encoded(shapes, row) for row in range(first, min(first + arguments.samples_per_shard, arguments.samples))),
        )
        for i, first in enumerate(firsts)
    ]


def encoded(shapes: Shapes, row: int) -> dict[str, Any]:
    """Return one sample by extension, its key as `__key__`."""
    scene, caption, picture = shapes.draw(row)
    file = io.BytesIO()
    picture.save(file, format="png")
    return {"__key__": f"{row:07d}", "png": file.getvalue(), "txt": caption, "json": asdict(scene)}


def run(arguments: Arguments) -> None:
    """Write the tars and say where they lie.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        paths = write_shapes(arguments)
    except OSError as error:
        raise RunError(f"out={arguments.out} cannot be written: {error}") from error
    print(f"{len(paths)} tars lie in {arguments.out}: {paths[0].name} to {paths[-1].name}")


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, write, and return the exit code: 0 done, 1 stopped by the world, 2 refused."""
    return exit_code(lambda: run(parse_verb(Arguments, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
