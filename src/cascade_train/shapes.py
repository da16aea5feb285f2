"""Write the procedural pictures as real webdataset tars.

    python -m cascade_train.shapes out=DIR [samples=2000] [samples_per_shard=500] [image_size=96] [seed=0]

Each sample is KEY.png (lossless), KEY.txt, and KEY.json with the words of the scene. The same arguments write
the same bytes.
"""

from __future__ import annotations

import io
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.data.shapes import Shapes
from cascade_train.data.tar_writer import write_tar
from cascade_train.errors import ConfigError

USAGE = "python -m cascade_train.shapes out=DIR samples=2000 samples_per_shard=500 image_size=96 seed=0"


@dataclass(kw_only=True)
class Arguments:
    """The verb's keys and their defaults.

    Attributes:
        out: folder to write into; made if missing, must hold no shards yet.
        samples: how many pictures.
        samples_per_shard: pictures in one tar.
        image_size: side of a picture in pixels.
        seed: which pictures.
    """

    out: str
    samples: int = 2000
    samples_per_shard: int = 500
    image_size: int = 96
    seed: int = 0


def write_shapes(arguments: Arguments) -> list[Path]:
    """Write the tars `shapes-000000.tar`, ... and return their paths.

    Raises:
        ConfigError: the folder holds shards already, or a number is out of range.
    """
    if arguments.samples_per_shard < 1:
        raise ConfigError(f"samples_per_shard={arguments.samples_per_shard} must be at least 1")
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


def parse(words: list[str]) -> Arguments:
    """Turn `key=value` words into arguments.

    Raises:
        ConfigError: a key is unknown, `out` is missing, or a value has the wrong type.
    """
    try:
        given = OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(words))
        return Arguments(**OmegaConf.to_container(given, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{str(error).splitlines()[0]}. Usage: {USAGE}") from error


def main(words: list[str] | None = None) -> int:
    """Run the verb and return the exit code."""
    try:
        paths = write_shapes(parse(sys.argv[1:] if words is None else words))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {len(paths)} tars to {paths[0].parent}: {paths[0].name} ... {paths[-1].name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
