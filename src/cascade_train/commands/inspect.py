"""Look at data before training: unreadable files, sizes, captions, a batch.

    cascade-train inspect data.urls=… out=inspect.html

Opens the data as a training does and writes a page. No model is built, no weights are read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.schema import limit
from cascade_train.errors import ConfigError, RunError

DEFAULTS = {"model": "c_3b", "task": "finetune"}
"""What is composed where nothing is chosen; only sizes and the tokenizer follow from it."""


@dataclass(kw_only=True)
class InspectArgs:
    """Look at data before training on it; writes a page with what is unreadable, sizes, captions and a batch."""

    out: str = "inspect.html"
    """Page to write."""
    read: int | None = 2000
    """Pictures to read and decode, evenly spread over the data; null = all."""
    pictures: int = 16
    """Pictures of a batch to show."""

    def __post_init__(self) -> None:
        limit(self, "", "read", "pictures", least=1)


def inspect(args: InspectArgs, cfg: DictConfig) -> int:
    """Look at the data, write the page, print a summary, and return 0.

    Raises:
        ConfigError: the data is missing, not of its source's form, or only to be streamed.
        RunError: the data or the page cannot be read or written.
    """
    from cascade_train.assembly.components import build_component  # heavy: torch and everything above it
    from cascade_train.data.data_set import open_data_set
    from cascade_train.data.survey import Report, survey
    from cascade_train.models.token_count import token_counter

    allow_unreadable(cfg.data)
    with library_log() as log:
        data = open_data_set(build_component(cfg, "data"), share=None, held_out=None)
        if not data.training.index.rows_are_samples:
            raise ConfigError("These tars can only be streamed, so there is no index to look at: copy them first.")
        found = survey(data.training, read=args.read, seed=cfg.run.seed)
        try:
            batch = data.shown_batch(args.pictures, seed=cfg.run.seed)
        except RunError as error:  # a page about data too damaged for a batch is worth having
            batch = None
            log.append(f"No batch could be made: {error}")
    encoder = cfg.model.get("text_encoder") or {}
    count = token_counter(encoder.get("tokenizer"), encoder.get("tokenizer_subfolder"))
    report = Report(
        title=f"Data of {cfg.data._target_.rpartition('.')[2]}, for pictures of {cfg.data.image_size} pixels",
        survey=found,
        tokens=tuple(count(list(found.captions.values()))),
        max_tokens=encoder.get("max_tokens", 77),
        counted_by=count.name,
        log=tuple(log),
        batch=batch,
    )
    write_page(Path(args.out), report.page())
    sys.stdout.write("\n".join([*report.lines(), f"{args.out} shows it all.", ""]))
    return 0


def allow_unreadable(node: Any) -> None:
    """Let every source below a node open data with any share of unreadable samples: the report lists them."""
    children = list(node.values()) if isinstance(node, DictConfig) else list(node)
    if isinstance(node, DictConfig) and "max_unreadable_share" in node:
        node.max_unreadable_share = 1.0
    for child in children:
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


def write_page(path: Path, page: str) -> None:
    """Write a page; a RunError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"out={path} cannot be written: {error.strerror}.") from error


COMMAND = Command(arguments=InspectArgs, run=inspect, run_defaults=DEFAULTS)
