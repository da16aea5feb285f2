"""Look at data before training: what cannot be read, is there twice or is cut.

    cascade-train inspect data.urls=… out=inspect.html

No model is built, no weights are read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.limits import limit
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import check_choice

FAULTS = ("unreadable", "duplicates", "near", "empty", "long")
"""What may be listed for data.quarantine."""
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
    """What is listed there: unreadable, duplicates (all but the first), near (all but the largest of those that look
    alike), empty and long (captions)."""
    captions: str | None = None
    """File to write with each caption that was read, its sample, and the file, key or template that it came from."""

    def __post_init__(self) -> None:
        limit(self, "", "read", "pictures", least=1)
        for fault in self.faults:
            check_choice("faults", fault, FAULTS)
        for key in ("out", "quarantine", "captions"):
            path = Path(getattr(self, key) or "")
            if path.is_file() and path.suffix not in (".html", ".json", ".jsonl"):
                raise ConfigError(f"{key}={path} would overwrite that file. Give a name that ends in .html or .jsonl.")


def inspect(args: InspectArgs, cfg: DictConfig) -> int:
    """Look at the data, write the page, print a summary, and return 0."""
    from cascade_train.assembly.components import build_component  # heavy: torch and everything above it
    from cascade_train.data.data_set import open_data_set
    from cascade_train.data.survey.look import survey
    from cascade_train.data.survey.report import Report
    from cascade_train.models.text_encoder import token_counter

    allowed = cfg.data.max_unreadable_share
    allow_unreadable(cfg.data)
    with library_log() as log:
        data = open_data_set(build_component(cfg, "data"), share=None, held_out=None)
        if not data.training.index.rows_are_samples:
            raise ConfigError("These tars can only be streamed, so there is no index to look at: copy them first.")
        if args.read is None and len(data.training.rows) > 10_000:  # a minute
            logging.getLogger(__name__).info("Decoding all pictures; read=2000 looks at so many, evenly spread.")
        found = survey(data.training, read=args.read, seed=cfg.run.seed)
        try:
            batch = data.shown_batch(args.pictures, seed=cfg.run.seed)
        except RunError as error:  # a page about data too damaged for a batch is worth having
            batch = None
            log.append(f"No batch could be made: {error}")
    encoder, is_dropped = cfg.model.get("text_encoder") or {}, cfg.data.get("leftover") == "drop"
    count = token_counter(encoder.get("tokenizer"), encoder.get("tokenizer_subfolder"))
    report = Report(
        title=f"Data of {cfg.data._target_.rpartition('.')[2]}, for pictures of {cfg.data.image_size} pixels",
        survey=found,
        tokens=tuple(count(list(found.captions.values()))),
        max_tokens=encoder.get("max_tokens", 77),
        max_unreadable_share=allowed,
        counted_by=count.name,
        log=tuple(log),
        batch=batch,
        unfilled=int((data.training.shapes % cfg.train.global_batch_size).sum()) if is_dropped else 0,
    )
    write("out", args.out, report.page())
    told = [*report.lines(), f"{args.out} shows it all."]
    if args.captions is not None:
        write("captions", args.captions, report.rows())
        told.append(f"{args.captions} has every caption that was read, and where it came from.")
    if args.quarantine is not None:
        lines = report.quarantine(args.faults)
        write("quarantine", args.quarantine, lines)
        told.append(f"{lines.count(chr(10))} samples to leave out: data.quarantine={args.quarantine}")
    sys.stdout.write("\n".join([*told, ""]))
    return 0


def allow_unreadable(node: Any) -> None:
    """Let every source below a node open data with any share of unreadable samples: the report lists them."""
    if isinstance(node, DictConfig) and "max_unreadable_share" in node:
        node.max_unreadable_share = 1.0
    for child in list(node.values() if isinstance(node, DictConfig) else node):
        if isinstance(child, DictConfig | ListConfig):
            allow_unreadable(child)


@contextmanager
def library_log() -> Iterator[list[str]]:
    """Collect the log of the sources: samples left out, and how many their filters keep."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cascade_train.data")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def write(key: str, name: str, text: str) -> None:
    """Write a file that an argument names; a RunError where it cannot be written."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{key}={path} cannot be written: {error.strerror}.") from error


COMMAND = Command(arguments=InspectArgs, run=inspect, run_defaults=DEFAULTS)
