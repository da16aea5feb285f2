"""Look at data before training: what cannot be read, is there twice or is cut.

    cascade-train inspect data.urls=… out=inspect.html

No model is built, no weights are read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.commands.parts.command_line import Command
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.output import check_output, replaced_file
from cascade_train.options import check_choice, limit

FAULTS = ("unreadable", "duplicates", "empty", "long")
"""What may be listed for data.quarantine."""
LISTS = {"quarantine": ("sample", "reason"), "captions": ("sample", "caption", "from", "tokens")}
"""Keys of each row of the lists, by which one of an earlier call is known."""
DEFAULTS = {"model": "c_3b", "task": "finetune"}
"""What is composed where nothing is chosen; only sizes and the tokenizer follow from it."""


@dataclass(kw_only=True)
class InspectArgs:
    """Look at data before training on it; writes a page with what is wrong, sizes, captions and a batch."""

    out: str = "inspect.html"
    """Page to write."""
    read: int | None = None
    """Pictures to read and decode, evenly spread over the data; null = all."""
    pictures: int = 16
    """Pictures of a batch to show."""
    quarantine: str | None = None
    """List to write of the samples that a training should leave out, by data.quarantine; null = none."""
    faults: list[str] = field(default_factory=lambda: ["unreadable", "duplicates"])
    """What is listed there: unreadable, duplicates (all but the first), empty and long (captions)."""
    captions: str | None = None
    """File to write with each caption that was read, its sample, and the file, key or template that it came from."""

    overwrite: bool = False
    """Replace files of these names: whatever is no page or list of an earlier call."""

    def __post_init__(self) -> None:
        limit(self, "", "read", "pictures", least=1)
        for fault in self.faults:
            check_choice("faults", fault, FAULTS)
        self.check_outputs()

    def check_outputs(self, *inputs: str) -> None:
        """Refuse names of files that must not be replaced, such as those of `inputs`; a ConfigError."""
        paths: dict[Path, str] = {}
        for key in ("out", "quarantine", "captions"):
            if (name := getattr(self, key)) is not None:
                path, columns = Path(name).expanduser(), LISTS.get(key, ())
                check_output(path, "inspect", key=key, overwrite=self.overwrite, inputs=inputs, columns=columns)
                if (other := paths.setdefault(path.resolve(), key)) != key:
                    raise ConfigError(f"{key}={name} is {other}, too. Name another file.")


def inspect(args: InspectArgs, cfg: DictConfig) -> int:
    """Look at the data, write the page, print a summary, and return 0."""
    from cascade_train.assembly.planning.samples import make_report  # heavy: torch and everything above it

    named = (cfg.data.get(key) for key in ("quarantine", "path"))
    args.check_outputs(*(name for name in named if isinstance(name, str) and Path(name).expanduser().is_file()))
    report = make_report(cfg, read=args.read, pictures=args.pictures)
    write("out", args.out, report.page())
    told = [line for line in report.lines() if line not in report.log]  # which stderr has
    told.append(f"{args.out} shows it all.")
    if args.captions is not None:
        write("captions", args.captions, report.rows())
        told.append(f"{args.captions} has every caption that was read, and where it came from.")
    if args.quarantine is not None:
        lines, unlisted = report.quarantine(args.faults)
        write("quarantine", args.quarantine, lines)
        told.append(f"{lines.count(chr(10))} samples to leave out: data.quarantine={args.quarantine}")
        if unlisted:
            told.append(f"{unlisted} more are not listed: a list has names, and samples that are well have theirs")
    sys.stdout.write("\n".join([*told, ""]))
    return 0


def write(key: str, name: str, text: str) -> None:
    """Write a file that an argument names; a RunError where it cannot be written."""
    path = Path(name).expanduser()
    try:
        with replaced_file(path) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{key}={path} cannot be written: {error.strerror}.") from error


COMMAND = Command(arguments=InspectArgs, run=inspect, run_defaults=DEFAULTS)
