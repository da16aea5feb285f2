"""The samples of a planned run, where they are on this machine: how many, their sizes, and the lengths of captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from cascade_train.assembly.components import build_component
from cascade_train.data.data_set import open_data_set
from cascade_train.errors import ConfigError

SURVEYED = 64
"""Samples whose captions are read."""

SHOWN = 6
"""Training sizes that are listed."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What is known of the samples.

    Attributes:
        count: of an epoch; None = not known, since they are streamed.
        notes: what opening the data logged, such as how many samples a filter keeps.
        buckets: training sizes, height and width in pixels, and how many samples each has, most first.
        long: of `read` captions, how many have more tokens than the text encoder takes.
        read: captions that were read.
        max_tokens: of the text encoder.
    """

    count: int | None
    notes: Sequence[str] = ()
    buckets: Sequence[tuple[int, int, int]] = ()
    long: int = 0
    read: int = 0
    max_tokens: int = 77

    def lines(self, seen: int) -> Iterator[str]:
        """Yield lines about a run that sees so many samples."""
        if self.count is None:
            yield "streamed, number of samples unknown"
            return
        sizes = ", ".join(f"{height}x{width}: {count:,}" for height, width, count in self.buckets[:SHOWN])
        more = "" if len(self.buckets) <= SHOWN else f", and {len(self.buckets) - SHOWN} more sizes"
        yield f"{self.count:,} samples, {seen / self.count:.3g} epochs; {sizes}{more}"
        yield from self.notes

    def warnings(self, global_batch_size: int) -> Iterator[str]:
        """Yield what is worth a warning."""
        small = [count for *_, count in self.buckets if count < global_batch_size]
        if small:
            yield (
                f"{len(small)} of {len(self.buckets)} training sizes have fewer samples than a global batch of"
                f" {global_batch_size}: theirs come with those of later epochs (data.leftover)."
            )
        if self.long:
            yield (
                f"{self.long} of {self.read} captions have more than {self.max_tokens} tokens and are cut;"
                " model.text_encoder.long_captions=true takes three times as many."
            )


def look(cfg: DictConfig, log: Sequence[str]) -> Samples | None:
    """Open the data of a run, as the run does, where it is on this machine; None = it is not.

    `log` is what the library logs about data meanwhile. Raises as `Source.open`.
    """
    places = cfg.data.get("urls") or cfg.data.get("path") or ""
    if any(text.startswith("pipe:") or "://" in text for text in ([places] if isinstance(places, str) else places)):
        return None
    source = build_component(cfg, "data")
    try:
        source.check()
    except (ConfigError, OSError):
        return None
    part = open_data_set(source, share=cfg.validate.share, held_out=None).training
    if not part.index.rows_are_samples:
        return Samples(count=None)
    if source.is_cache:
        return Samples(count=len(part.rows), notes=log)
    from cascade_train.data.survey import survey  # they take a second
    from cascade_train.models.token_count import token_counter

    found = survey(part, read=SURVEYED, seed=cfg.run.seed)
    encoder = cfg.model.get("text_encoder") or {}
    count = token_counter(encoder.get("tokenizer"), encoder.get("tokenizer_subfolder"))
    most = encoder.get("max_tokens", 77) * (3 if encoder.get("long_captions") else 1)
    tokens = count(list(found.captions.values()))
    return Samples(
        count=found.samples,
        notes=log,
        buckets=[(each.height, each.width, each.samples) for each in found.buckets],
        long=sum(each > most for each in tokens),
        read=len(tokens),
        max_tokens=most,
    )
