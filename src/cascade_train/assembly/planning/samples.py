"""The samples of a run before it begins: how many, their sizes, the lengths of captions, and what is amiss."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf

from cascade_train.assembly.components import build_component
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.order.position import ShapeGroups
from cascade_train.data.survey import Report, survey
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.text_encoder import LONG_PIECES, TokenCounter, token_counter

SHOWN = 6
"""Training sizes that are listed."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a run.

    Attributes:
        count: of an epoch; None = unknown, as below.
        steps: of the run.
        epoch_steps: optimizer steps of an epoch.
        saved_steps: between checkpoints, where `checkpoint.every_epochs` counts these.
        notes: why they are unknown, or what opening the data logged, such as how many samples a filter keeps.
        buckets: height and width in pixels of each training size, and its number of samples, most first.
    """

    count: int | None = None
    steps: int | None = None
    epoch_steps: float | None = None
    saved_steps: int | None = None
    notes: Sequence[str] = ()
    buckets: Sequence[tuple[int, int, int]] = ()

    def lines(self, steps: int | None) -> Iterator[str]:
        """Yield the plan's lines on the samples of a run with this many steps."""
        if self.count is not None and self.epoch_steps is not None and steps is not None:
            sizes = ", ".join(f"{height}x{width}: {count:,}" for height, width, count in self.buckets[:SHOWN])
            more = "" if len(self.buckets) <= SHOWN else f", and {len(self.buckets) - SHOWN} more sizes"
            yield f"{self.count:,} samples, {steps / self.epoch_steps:.3g} epochs; {sizes}{more}"
        yield from self.notes

    def warnings(self, global_batch_size: int) -> Iterator[str]:
        """Yield what is worth a warning."""
        small = [count for *_, count in self.buckets if count < global_batch_size]
        if small:
            yield (
                f"{len(small)} of {len(self.buckets)} training sizes have fewer samples than a global batch of"
                f" {global_batch_size}: theirs come with those of later epochs."
            )


def look(cfg: DictConfig, *, ranks: int) -> Samples:
    """Open the data of a run on `ranks`, as the run does, where it is on this machine.

    Raises as the run does where data that is there cannot be used.
    """
    with library_log() as log:
        return _look(cfg, log, ranks=ranks)


def _look(cfg: DictConfig, log: Sequence[str], *, ranks: int) -> Samples:
    remote = next((place for place in _places(OmegaConf.to_container(cfg.data, resolve=True)) if "://" in place), None)
    if remote is not None:
        return Samples(notes=["not opened: it is not on this machine"])
    source = build_component(cfg, "data")
    try:
        source.check()
    except (ConfigError, OSError) as error:
        return Samples(notes=[f"not opened: {error}"])
    share = None if cfg.validate.urls is not None else cfg.validate.share
    data = open_data_set(source, share=share, held_out=None)
    data.check_sides(build_component(cfg, "model").image_multiple)
    batch = {key: cfg.train[key] for key in ("global_batch_size", "micro_batch_size")}
    feed = data.training.load(seed=cfg.run.seed, rank=0, ranks=ranks, **batch)
    limits = {key: cfg.train[key] for key in ("max_steps", "max_epochs", "global_batch_size")}
    steps = data.last_step(feed, **limits)
    epochs = cfg.checkpoint.every_epochs, cfg.validate.every_epochs
    saved_steps, _ = (None if each is None else feed.steps_of_epochs(each) for each in epochs)
    part = data.training
    if not part.index.rows_are_samples:
        return Samples(steps=steps, notes=["streamed, number of samples unknown"])
    return Samples(
        count=len(part.rows),
        steps=steps,
        saved_steps=saved_steps,
        epoch_steps=len(part.rows) / batch["global_batch_size"],
        notes=log,
        buckets=_sizes(part),
    )


def _places(node: Any) -> Iterator[str]:
    """Yield the files that a data node, or one within it, names; commands as `pipe://`."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key in ("urls", "path"):
            places = [value] if isinstance(value, str) else value or []
            yield from (place.replace("pipe:", "pipe://", 1) for place in places)
        else:
            yield from _places(value)


def _sizes(part: Rows) -> list[tuple[int, int, int]]:
    """(height, width, number of samples) of each training size, most first."""
    shapes = ShapeGroups.of(part.source, part.index, part.rows, part.digest)
    count_K, sizes_K2 = shapes.groups.sizes, shapes.buckets.sizes_K2
    order = [place for place in np.argsort(-count_K, kind="stable").tolist() if count_K[place]]
    return [(*sizes_K2[place].tolist(), int(count_K[place])) for place in order]


def _max_tokens(encoder: Mapping[str, Any]) -> int:
    """Tokens of a caption that a text encoder takes, start and end included."""
    pieces = LONG_PIECES if encoder.get("long_captions") else 1
    return (int(encoder.get("max_tokens", 77)) - 2) * pieces + 2


def _counter(encoder: Mapping[str, Any]) -> TokenCounter:
    return token_counter(encoder.get("tokenizer"), encoder.get("tokenizer_subfolder"))


def make_report(cfg: DictConfig, *, read: int | None, pictures: int) -> Report:
    """Look at the data of a run: read so many pictures, None = all, and make a batch of `pictures`."""
    allowed = cfg.data.max_unreadable_share
    allow_unreadable(cfg.data)
    with library_log() as log:
        data = open_data_set(build_component(cfg, "data"), share=None, held_out=None)
        if not data.training.index.rows_are_samples:
            raise ConfigError("These tars can only be streamed, so there is no index to look at: copy them first.")
        if read is None and len(data.training.rows) > 10_000:  # a minute
            logging.getLogger(__name__).info("Decoding all pictures; read=2000 looks at so many, evenly spread.")
        found = survey(data.training, read=read, seed=cfg.run.seed)
        try:
            batch = data.shown_batch(pictures, seed=cfg.run.seed)
        except RunError as error:  # a page about data too damaged for a batch is worth having
            batch = None
            logging.getLogger("cascade_train.data").warning("No batch could be made: %s", error)
    encoder = cfg.model.get("text_encoder") or {}
    count = _counter(encoder)
    return Report(
        title=f"Data of {cfg.data._target_.rpartition('.')[2]}, for pictures of {cfg.data.image_size} pixels",
        survey=found,
        tokens=tuple(count(found.captions)),
        max_tokens=_max_tokens(encoder),
        can_take_more=not encoder.get("long_captions"),
        max_unreadable_share=allowed,
        counted_by=count.name,
        log=tuple(log),
        batch=batch,
    )


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
