"""Write a folder of pictures as webdataset tars.

    cascade-train pack folder=DIR out=DIR

The tars are read back and compared. The same folder gives the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cascade_train.commands.parts.command_line import Command
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import check_least

SHOWN = 20
_IN_NO_NAME = re.compile(r"[./*?\[\]{}]")


@dataclass(kw_only=True)
class PackArgs:
    """Write pictures, their captions, json or yaml files and masks as webdataset tars."""

    folder: str
    """Folder with the pictures, in it or in folders below it."""
    out: str
    """Folder to write into; made if missing, must hold no tars of the name yet."""
    samples_per_shard: int = 1000
    """Pictures in one tar."""
    name: str | None = None
    """How the tars' names begin; null = as the folder is called, dots and wildcards as underscores."""
    seed: int | None = None
    """Order of the samples: a number mixes them, so that every tar holds a bit of everything; null = by name."""
    overwrite: bool = False
    """Replace tars of the same names."""
    caption_from: str = "file_or_name"
    """file_or_name, file or name: a text file beside each picture, or its name up to the first underscore."""

    def __post_init__(self) -> None:
        check_least("samples_per_shard", self.samples_per_shard, 1, "it is how many pictures a tar holds.")
        if self.name is not None and (not self.name or _IN_NO_NAME.search(self.name)):
            raise ConfigError(f"name={self.name} must be a file name without dots, slashes and wildcards.")
        if set(str(Path(self.out).expanduser().absolute())) & set("{}"):
            raise ConfigError(f"out={self.out}: data.urls expands braces in paths; choose a folder without them.")


def pack(args: PackArgs) -> int:
    """Write the tars, print what they hold and what was left out, and return 0."""
    from cascade_train.data.tar import packing  # heavy: numpy

    of_folder = _IN_NO_NAME.sub("_", Path(args.folder).expanduser().resolve().name)
    name = of_folder if args.name is None else args.name
    try:
        options = {key: getattr(args, key) for key in ("caption_from", "samples_per_shard", "seed", "overwrite")}
        packed = packing.pack(args.folder, Path(args.out), name=name, **options)
    except OSError as error:
        raise RunError(f"out={args.out}: {error}") from error
    except ValueError as error:  # the source names the keys of a run
        raise ConfigError(str(error).replace("data.path", "folder").replace("data.", "")) from error
    for path, reason in packed.left_out[:SHOWN]:
        print(f"left out {path}: {reason}")
    if len(packed.left_out) > SHOWN:
        print(f"left out {len(packed.left_out) - SHOWN} more")
    last = f"{{000000..{len(packed.tars) - 1:06d}}}" if len(packed.tars) > 1 else "000000"
    print(
        f"{packed.samples} samples lie in {len(packed.tars)} tars, read back and compared; {len(packed.left_out)}"
        f" pictures were left out. Train on them: data=webdataset 'data.urls=\"{args.out}/{name}-{last}.tar\"'"
    )
    return 0


COMMAND = Command(arguments=PackArgs, run=pack)
