"""A survey as `cascade-train inspect` reports it: lines of text, one HTML page, and a list for data.quarantine.

Findings come in the order of what they cost. The page is laid out in survey.html and needs no other files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import torch
from PIL import Image

from cascade_train.batch import Batch, sample_seed
from cascade_train.data.buckets import PRESETS, BucketTable
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.decoding.framing import gray_mask
from cascade_train.data.index.rows import Index
from cascade_train.data.sample import UnreadableSampleError, most_unreadable, sufficient_share

MUCH = 0.1  # share of a picture that counts as much to crop away


class BucketCount(NamedTuple):
    """A training size in pixels, its samples, and how many of them are smaller than it."""

    height: int
    width: int
    samples: int
    enlarged: int


class Cropping(NamedTuple):
    """The effect of a choice of `data.aspect_ratios` on the pictures of known size."""

    aspect_ratios: str  # as an override has it
    sizes: int  # training sizes that occur
    cropped: float  # mean share of a picture that is cropped away
    much: int  # samples that lose more than `MUCH`
    enlarged: int  # samples that are smaller than their size


class Text(NamedTuple):
    """A caption as in the first epoch, and its origin: a file, a key, and whether it was drawn."""

    caption: str
    origin: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """The properties of a set of samples. What was found in some is keyed by their rows of the index."""

    samples: int  # of an epoch
    pictures: int  # different pictures among them: repeats count once
    width_N: np.ndarray  # of the pictures in pixels, upright; 0 where the header cannot be read
    height_N: np.ndarray  # the same
    buckets: tuple[BucketCount, ...]  # the training sizes that occur, most samples first
    shapes: tuple[Cropping, ...]  # the chosen ones first, then others
    names: dict[int, str]  # of those that were read and decoded
    namesakes: dict[int, int]  # how many samples have that name
    unreadable: dict[int, str] = field(default_factory=dict)  # and why
    rotated: list[int] = field(default_factory=list)  # by an orientation tag
    converted: list[int] = field(default_factory=list)  # from a colour profile to sRGB
    twice: list[list[int]] = field(default_factory=list)  # pictures of the same content, together
    texts: dict[int, Text] = field(default_factory=dict)  # captions of those that could be read

    @property
    def captions(self) -> list[str]:
        """Captions of `texts`."""
        return [text.caption for text in self.texts.values()]


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at indexed samples; `read` of them are decoded, evenly spread, None = all. The seed draws captions."""
    rows = _different(part)
    chosen = np.arange(len(rows))
    chosen = chosen if read is None else np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))
    namesakes_N = _namesakes(part.index, rows)
    width_N, height_N = _sizes(part, rows)
    result = Survey(
        samples=len(part.rows),
        pictures=len(rows),
        width_N=width_N,
        height_N=height_N,
        buckets=_buckets(part),
        shapes=_shapes(part),
        names={row: part.index.name(row) for row in rows[chosen].tolist()},
        namesakes=dict(zip(rows[chosen].tolist(), namesakes_N[chosen].tolist(), strict=True)),
    )
    same: dict[bytes, dict[object, int]] = defaultdict(dict)  # the first row of each picture, by content
    for row in result.names:
        try:
            _look_at(part, row, seed, result, same)
        except (UnreadableSampleError, OSError) as error:
            result.unreadable[row] = str(error)
    result.twice.extend(list(pictures.values()) for pictures in same.values() if len(pictures) > 1)
    return result


def _look_at(part: Rows, row: int, seed: int, result: Survey, same: dict[bytes, dict[object, int]]) -> None:
    raw, pictures = part.source.read(row), part.index.split_by
    target = part.source.bucket_table(part.index).sizes_K2[0].tolist()
    if raw.image is not None:
        content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image
        of_one_name = (
            int(part.index.table["shard"][row]),
            part.index.keys[row],
        )  # rows of a table may have one picture
        identity = of_one_name if pictures is None else pictures[row]
        same[hashlib.blake2b(content, digest_size=16).digest()].setdefault(identity, row)
        picture = decode(raw.image, target, max_pixels=part.source.max_pixels)
        result.rotated.extend([row] * picture.rotated)
        result.converted.extend([row] * picture.converted)
        if raw.mask is not None:
            gray_mask(raw.mask, picture.size, target, max_pixels=part.source.max_pixels)
    generator = torch.Generator().manual_seed(sample_seed(seed, 0, row, "caption"))
    result.texts[row] = Text(*part.source.captions_of(row).traced(raw, generator))


def _different(part: Rows) -> np.ndarray:
    """The first row of each sample; two tars may have a key in common."""
    table, rows = part.index.table[part.rows], part.rows
    columns = [table[name] for name in table.dtype.names or () if name != "shard"]
    columns += [
        *_shards_and_keys(part.index, rows),
        part.index.content[rows],
    ]  # tars of several folders may have a name
    order, equals_next = _neighbours(columns)
    return np.sort(rows[order[np.r_[True, ~equals_next]]])


def _namesakes(index: Index, rows: np.ndarray) -> np.ndarray:
    """How many of the rows have the name of each, (N,) int64."""
    order, equals_next = _neighbours(_shards_and_keys(index, rows))
    group_N = np.zeros(len(rows), dtype=np.int64)
    group_N[order[1:]] = np.cumsum(~equals_next)
    return np.bincount(group_N)[group_N]


def _neighbours(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A stable order by these columns, (N,), and where a row in it equals the next one, (N - 1,) bool."""
    order = np.lexsort(columns)
    return order, np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])


def _shards_and_keys(index: Index, rows: np.ndarray) -> list[np.ndarray]:
    """A number of each row's shard, equal for shards of one name, and its key."""
    _, shard_of = np.unique(index.shards, return_inverse=True)
    return [shard_of[index.table["shard"][rows]], index.keys[rows]]


def _sizes(part: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Width and height of rows in pixels, (N,) int64 each, 0 = unknown."""
    width_N, height_N = (part.index.table[name][rows].astype(np.int64) for name in ("width", "height"))
    return width_N, height_N


def _buckets(part: Rows) -> tuple[BucketCount, ...]:
    sizes, table = _sizes(part, part.rows), part.source.bucket_table(part.index)
    bucket_N = table.nearest(*sizes)
    enlarged = Counter(bucket_N[table.enlargement(bucket_N, *sizes) > 1.0].tolist())
    counts = Counter(np.sort(bucket_N).tolist()).most_common()
    sizes_K2 = table.sizes_K2.tolist()
    return tuple(BucketCount(sizes_K2[k][0], sizes_K2[k][1], samples, enlarged[k]) for k, samples in counts)


def _shapes(part: Rows) -> tuple[Cropping, ...]:
    width_N, height_N = _sizes(part, part.rows)
    known = (width_N > 0) & (height_N > 0)
    sizes, source = (width_N[known], height_N[known]), part.source
    shapes = [_shape(str(source.aspect_ratios or "null"), source.bucket_table(part.index), *sizes)]
    for name, ratios in {"null": None, **{preset: preset for preset in PRESETS}}.items():
        if name != shapes[0].aspect_ratios:
            try:
                shapes.append(_shape(name, source.buckets.table(source.image_size, ratios), *sizes))
            except ValueError:  # a ratio too extreme for so small a picture
                continue
    return tuple(shapes)


def _shape(name: str, table: BucketTable, width_N: np.ndarray, height_N: np.ndarray) -> Cropping:
    bucket_N = table.nearest(width_N, height_N)
    height_of, width_of = table.sizes_K2[bucket_N].T
    wider = (width_N * height_of) / np.maximum(height_N * width_of, 1)
    lost = 1 - np.minimum(wider, 1 / np.maximum(wider, 1e-9))
    return Cropping(
        aspect_ratios=name,
        sizes=len(np.unique(bucket_N)),
        cropped=float(lost.mean()) if len(lost) else 0.0,
        much=int((lost > MUCH).sum()),
        enlarged=int((table.enlargement(bucket_N, width_N, height_N) > 1.0).sum()),
    )


NAMES_IN_TEXT = 5
NAMES_ON_PAGE = 200
LONGEST = 200
"""Characters of a caption or word on the page."""
WORDS = 20
SIDES_PX = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
MEGAPIXELS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)
THUMBNAIL_PX = 192
PAGE = Path(__file__).with_name("survey.html")


class Finding(NamedTuple):
    """An observation about the data, with its remedy."""

    what: str  # behind the number of samples
    rows: Mapping[int, str] | int  # the samples, and what is wrong with each; or how many there are
    cost: float = 0.0  # share of an epoch that is lost by it, estimated from what was read, in [0, 1]
    remedy: str = ""  # empty = none that one key gives

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.rows if isinstance(self.rows, int) else len(self.rows)} {self.what}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """All that is known."""

    title: str  # which data this is about
    survey: Survey  # of the samples
    tokens: tuple[int, ...]  # of each caption, start and end included, in the order of the survey
    can_take_more: bool  # whether the text encoder could take longer captions
    max_tokens: int  # of the model's text encoder
    counted_by: str  # which tokenizer counted
    log: tuple[str, ...]  # what was logged when the data was opened: what is left out, how many each filter keeps
    batch: Batch | None  # some samples of one training size; None = none could be made
    max_unreadable_share: float = 1.0  # of the samples, above which a run stops

    def counts(self) -> list[str]:
        """How many samples there are, and what their captions are like, in lines."""
        survey, cropped = self.survey, 100 * self.survey.shapes[0].cropped
        lines = [
            f"{survey.samples} samples in an epoch, {survey.pictures} different pictures",
            f"{len(survey.names)} of them read and decoded",
            f"{len(survey.buckets)} training sizes; {cropped:.1f} % of a picture is cut away on average",
            f"{sum(bucket.enlarged for bucket in survey.buckets)} of {survey.samples} samples are enlarged",
        ]
        if self.tokens:
            low, middle, high = np.percentile(self.tokens, (5, 50, 95)).round().astype(int).tolist()
            different = len(set(survey.captions))
            lines += [
                f"captions of {middle} tokens, 9 of 10 between {low} and {high}; {different} different ones",
                f"captions come from {'; '.join(f'{name} ({count})' for name, count in self.origins)}",
            ]
        return lines

    @property
    def origins(self) -> list[tuple[str, int]]:
        """Where captions came from, and how many of each."""
        return Counter(text.origin for text in self.survey.texts.values()).most_common()

    @cached_property
    def all_findings(self) -> dict[str, Finding]:
        """Every finding by name, those of nothing too."""
        survey, names, chosen = self.survey, self.survey.names, self.survey.shapes[0]
        read, unreadable = max(1, len(names)), survey.unreadable
        copies = {row: f"the same as {names[rows[0]]}" for rows in survey.twice for row in rows[1:]}
        tokens = dict(zip(survey.texts, self.tokens, strict=True))
        long = {row: f"its caption has {count} tokens" for row, count in tokens.items() if count > self.max_tokens}
        empty = {row: "its caption is empty" for row, text in survey.texts.items() if not text.caption.strip()}
        lost, unknown = sum(1 - self.max_tokens / tokens[row] for row in long), int((survey.width_N == 0).sum())
        longer = "model.text_encoder.long_captions=true takes three times as many" * self.can_take_more
        turned, converted = (dict.fromkeys(rows, "") for rows in (survey.rotated, survey.converted))
        best = min(survey.shapes, key=lambda shape: shape.much)
        better = (
            f"data.aspect_ratios={best.aspect_ratios} leaves {best.much} of them" if best.much < chosen.much else ""
        )
        lost_area = chosen.cropped if chosen.much else 0.0
        stop = self._stop(len(unreadable), read)
        over = f"more than {self.max_tokens} tokens, by {self.counted_by}"
        return {
            "unreadable": Finding("cannot be read", unreadable, len(unreadable) / read, stop),
            "duplicates": Finding("pictures have the content of another one", copies, len(copies) / read),
            "empty": Finding("captions are empty", empty, len(empty) / read),
            "long": Finding(f"captions have {over}", long, lost / read, longer),
            "rotated": Finding("pictures are turned by their orientation tag; they are trained upright", turned),
            "converted": Finding("pictures have another colour profile; they are trained as sRGB", converted),
            "header": Finding("have no readable header: unknown size", unknown, unknown / max(1, survey.pictures)),
            "cropped": Finding(f"samples lose more than {MUCH:.0%} to cropping", chosen.much, lost_area, better),
        }

    def _stop(self, unreadable: int, read: int) -> str:
        if unreadable <= most_unreadable(read, self.max_unreadable_share):
            return ""
        return (
            f"a run stops, since data.max_unreadable_share={self.max_unreadable_share:g} allows fewer: leave them out"
            f" by data.quarantine=<list>, or allow data.max_unreadable_share={sufficient_share(unreadable, read):g}"
        )

    def names_of(self, finding: Finding, most: int) -> list[str]:
        """The first samples of a finding, and what is wrong with each."""
        rows = [] if isinstance(finding.rows, int) else list(finding.rows.items())
        names = [self.survey.names[row] + (f" ({why})" if why else "") for row, why in rows[:most]]
        return [*names, *(["..."] if len(rows) > most else [])]

    def findings(self) -> list[Finding]:
        """What is worth a look, what costs most first."""
        return sorted(
            filter(lambda finding: finding.rows, self.all_findings.values()), key=lambda finding: -finding.cost
        )

    def lines(self) -> list[str]:
        """The report as text, with the first names of each finding."""
        findings = list(map(self._line_of, self.findings()))
        return [self.title, *self.log, *self.counts(), *(findings or ["nothing found that is worth a look"])]

    def _line_of(self, finding: Finding) -> str:
        cost = f" [{100 * finding.cost:.3g} % of an epoch]" if finding.cost else ""
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        names = "; ".join(self.names_of(finding, NAMES_IN_TEXT))
        return f"!{cost} {finding.text}{remedy}{f': {names}' if names else ''}"

    def quarantine(self, faults: Sequence[str]) -> tuple[str, int]:
        """Lines for `data.quarantine` of some findings, and how many samples have a name that others share."""
        reasons: dict[int, str] = {}
        for fault in faults:
            rows = self.all_findings[fault].rows
            reasons = reasons if isinstance(rows, int) else {**rows, **reasons}
        names, counts = self.survey.names, Counter(self.survey.names[row] for row in reasons)
        whole = {row: why for row, why in reasons.items() if counts[names[row]] == self.survey.namesakes[row]}
        listed = {names[row]: why for row, why in reversed(whole.items())}
        lines = [json.dumps({"sample": name, "reason": listed[name]}) + "\n" for name in reversed(listed)]
        return "".join(lines), len(reasons) - len(whole)

    def rows(self) -> str:
        """A line of JSON for each caption: its sample, what it is, where it came from, and its tokens."""
        texts = zip(self.survey.texts.items(), self.tokens, strict=True)
        rows = (
            {"sample": self.survey.names[row], "caption": text.caption, "from": text.origin, "tokens": count}
            for (row, text), count in texts
        )
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def page(self) -> str:
        """The report as one HTML page."""
        survey, known = self.survey, self.survey.width_N > 0
        width_N, height_N = survey.width_N[known], survey.height_N[known]
        limits = [*range(10, self.max_tokens, 10), self.max_tokens]
        captions = survey.captions
        words = Counter(word for caption in captions for word in set(re.findall(r"\w+", caption.lower())))
        sizes = [(f"{bucket.height} x {bucket.width}", bucket.samples) for bucket in survey.buckets]
        charts = [
            ("Training sizes (height x width)", sizes),
            ("Shorter side, pixels", histogram(np.minimum(width_N, height_N), SIDES_PX)),
            ("Megapixels", histogram(width_N * height_N / 1e6, MEGAPIXELS)),
            ("Width / height", histogram(width_N / height_N, RATIOS)),
            ("Where captions come from", self.origins),
            (f"Tokens of captions, by {self.counted_by}", histogram(np.array(self.tokens), limits)),
            ("Commonest captions", Counter(captions).most_common(10)),
            ("Commonest words, by captions that have them", words.most_common(WORDS)),
        ]
        template = jinja2.Environment(autoescape=True).from_string(PAGE.read_text(encoding="utf-8"))
        shown = {"names_shown": NAMES_ON_PAGE, "longest": LONGEST}
        return template.render(report=self, charts=charts, pictures=list(self._pictures()), **shown)

    def _pictures(self) -> Iterator[tuple[str, str, str]]:
        if self.batch is not None and self.batch.image_BCHW is not None:
            images = map(_encoded, self.batch.image_BCHW.numpy())
            yield from zip(images, self.batch.keys, self.batch.captions, strict=True)


def histogram(values: np.ndarray, limits: Sequence[float]) -> list[tuple[str, int]]:
    """Count values up to each limit, and above the last."""
    place = np.searchsorted(np.asarray(limits, dtype=float), values, side="left")
    counts = np.bincount(place, minlength=len(limits) + 1).tolist()
    names = [f"up to {limits[0]:g}"] + [f"{low:g} to {high:g}" for low, high in zip(limits, limits[1:], strict=False)]
    return list(zip([*names, f"above {limits[-1]:g}"], counts, strict=True))


def _encoded(image: np.ndarray) -> str:
    picture, file = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))), io.BytesIO()
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    picture.save(file, format="jpeg", quality=88)
    return base64.b64encode(file.getvalue()).decode()
