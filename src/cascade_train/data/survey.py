"""What a set of samples is like, as `cascade-train inspect` reports it: in lines of text, and on one HTML page.

Sizes come from the index, the rest from reading samples. The page is laid out in survey.html and needs no other files.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image

from cascade_train.batch import Batch, sample_seed
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.sample import UnreadableSampleError

NAMES_IN_TEXT = 5
NAMES_ON_PAGE = 200
SIDES_PX = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
MEGAPIXELS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)
THUMBNAIL_PX = 192
PAGE = Path(__file__).with_name("survey.html")


@dataclass(frozen=True, kw_only=True)
class BucketCount:
    """A training size in pixels, its samples, and how many of them are smaller than it."""

    height: int
    width: int
    samples: int
    enlarged: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """What a set of samples is like."""

    samples: int  # of an epoch
    pictures: int  # different pictures among them: repeats count once
    width_N: np.ndarray  # of the pictures in pixels, upright; 0 where the header cannot be read
    height_N: np.ndarray  # the same
    buckets: tuple[BucketCount, ...]  # the training sizes that occur, most samples first
    cropped: float  # mean share of a picture that is cropped away
    read: int  # how many pictures were read and decoded
    unreadable: tuple[tuple[str, str], ...]  # name and reason of those that could not be
    rotated: tuple[str, ...]  # names of those that EXIF rotates
    twice: tuple[tuple[str, ...], ...]  # names of pictures with the same content, together
    captions: dict[str, str]  # name -> caption of those that could be read, as in the first epoch


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something worth a look: one sentence, and the names of the samples or more text about each."""

    text: str
    names: tuple[str, ...] = ()

    def first(self, count: int) -> list[str]:
        """Return the first names."""
        return [*self.names[:count], *(["..."] if len(self.names) > count else [])]


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """All that is known."""

    title: str  # which data this is about
    survey: Survey  # of the samples
    tokens: tuple[int, ...]  # of each caption, start and end included, in the order of the survey
    max_tokens: int  # of the model's text encoder
    counted_by: str  # which tokenizer counted
    log: tuple[str, ...]  # what was logged when the data was opened: what is left out, how many each filter keeps
    batch: Batch | None  # some samples of one training size; None = none could be made

    def counts(self) -> list[str]:
        """Return how many samples there are, in lines."""
        found = self.survey
        return [
            f"{found.samples} samples in an epoch, {found.pictures} different pictures",
            f"{found.read} of them read and decoded",
            f"{len(found.buckets)} training sizes; {100 * found.cropped:.1f} % of a picture is cut away on average",
            f"{sum(each.enlarged for each in found.buckets)} of {found.samples} samples are enlarged",
        ]

    def findings(self) -> list[Finding]:
        """Return what is worth a look, the worst first."""
        found = self.survey
        named = list(zip(found.captions, self.tokens, strict=True))
        long = tuple(f"{name} ({count})" for name, count in named if count > self.max_tokens)
        empty = tuple(name for name, caption in found.captions.items() if not caption.strip())
        same = tuple(" = ".join(names) for names in found.twice)
        unknown = int((found.width_N == 0).sum())
        findings = [
            (len(found.unreadable), "cannot be read", tuple(f"{name} ({why})" for name, why in found.unreadable)),
            (unknown, "have no readable header, so their size is unknown", ()),
            (len(same), "contents come more than once, under several names", same),
            (len(empty), "captions are empty", empty),
            (len(long), f"captions have more than {self.max_tokens} tokens, by {self.counted_by}", long),
            (len(found.rotated), "pictures are turned by their EXIF tag; they are trained upright", found.rotated),
        ]
        return [Finding(text=f"{count} {text}", names=names) for count, text, names in findings if count]

    def lines(self) -> list[str]:
        """Return the report as text, with the first names of each finding."""
        findings = [
            f"! {each.text}{': ' if each.names else ''}{'; '.join(each.first(NAMES_IN_TEXT))}"
            for each in self.findings()
        ]
        return [self.title, *self.log, *self.counts(), *(findings or ["nothing found that is worth a look"])]

    def page(self) -> str:
        """Return the report as one HTML page."""
        found, known = self.survey, self.survey.width_N > 0
        width_N, height_N = found.width_N[known], found.height_N[known]
        limits = [*range(10, self.max_tokens, 10), self.max_tokens]
        common = Counter(found.captions.values()).most_common(10)
        sizes = [(f"{each.height} x {each.width}", each.samples) for each in found.buckets]
        charts = [
            ("Training sizes (height x width)", sizes),
            ("Shorter side, pixels", _histogram(np.minimum(width_N, height_N), SIDES_PX)),
            ("Megapixels", _histogram(width_N * height_N / 1e6, MEGAPIXELS)),
            ("Width / height", _histogram(width_N / height_N, RATIOS)),
            (f"Tokens of captions, by {self.counted_by}", _histogram(np.array(self.tokens), limits)),
            ("Commonest captions", [(text[:200], count) for text, count in common]),
        ]
        pictures: list[tuple[str, str, str]] = []
        if self.batch is not None and self.batch.image_BCHW is not None:
            images = map(_encoded, self.batch.image_BCHW.numpy())
            pictures = list(zip(images, self.batch.keys, self.batch.captions, strict=True))
        template = jinja2.Environment(autoescape=True).from_string(PAGE.read_text(encoding="utf-8"))
        return template.render(report=self, charts=charts, pictures=pictures, names_shown=NAMES_ON_PAGE)


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at samples that are not a stream; `read` pictures are read and decoded, evenly spread, None = all.

    The seed is that of the first epoch's captions.
    """
    rows = _different(part)
    chosen = rows if read is None else rows[np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))]
    unreadable, rotated, captions = list[tuple[str, str]](), list[str](), dict[str, str]()
    same = defaultdict[bytes, list[str]](list)
    height, width = part.source.bucket_table(part.index).sizes_K2[0].tolist()
    for row in chosen.tolist():
        name = part.index.name(row)
        try:
            raw = part.source.read(row)
            content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image or b""
            same[hashlib.blake2b(content, digest_size=16).digest()].append(name)
            if raw.image is not None and decode(raw.image, (height, width), max_pixels=part.source.max_pixels).rotated:
                rotated.append(name)
            generator = torch.Generator().manual_seed(sample_seed(seed, 0, row, "caption"))
            captions[name] = part.source.captions_of(row)(raw, generator)
        except (UnreadableSampleError, OSError) as error:
            unreadable.append((name, str(error)))
    buckets, cropped = _buckets(part)
    return Survey(
        samples=len(part.rows),
        pictures=len(rows),
        width_N=part.index.table["width"][rows].astype(np.int64),
        height_N=part.index.table["height"][rows].astype(np.int64),
        buckets=buckets,
        cropped=cropped,
        read=len(chosen),
        unreadable=tuple(unreadable),
        rotated=tuple(rotated),
        twice=tuple(tuple(names) for names in same.values() if len(names) > 1),
        captions=captions,
    )


def _different(part: Rows) -> np.ndarray:
    """Return the first row of each sample; two tars may have a key in common."""
    fields = [name for name in part.index.table.dtype.names or () if name != "shard"]
    places = part.index.table[fields][part.rows].tolist()
    first: dict[tuple[str, Any], int] = {}
    for row, place in zip(part.rows.tolist(), places, strict=True):
        first.setdefault((part.index.name(row), place), row)
    return np.array(list(first.values()), dtype=np.int64)


def _buckets(part: Rows) -> tuple[tuple[BucketCount, ...], float]:
    """Return the training sizes of all samples, and the mean share of a picture that is cropped away."""
    width_N, height_N = (part.index.table[name][part.rows].astype(np.int64) for name in ("width", "height"))
    table = part.source.bucket_table(part.index)
    bucket_N = table.nearest(width_N, height_N)
    enlarged_N = table.enlargement(bucket_N, width_N, height_N) > 1.0
    height_K, width_K = table.sizes_K2.T
    counts = [
        BucketCount(
            height=int(height_K[bucket]),
            width=int(width_K[bucket]),
            samples=int((bucket_N == bucket).sum()),
            enlarged=int(enlarged_N[bucket_N == bucket].sum()),
        )
        for bucket in np.unique(bucket_N).tolist()
    ]
    known = (width_N > 0) & (height_N > 0)
    wider = (width_N[known] * height_K[bucket_N[known]]) / (height_N[known] * width_K[bucket_N[known]])
    kept = np.minimum(wider, 1 / wider)
    cropped = float(1 - kept.mean()) if known.any() else 0.0
    return tuple(sorted(counts, key=lambda each: -each.samples)), cropped


def _histogram(values: np.ndarray, limits: Sequence[float]) -> list[tuple[str, int]]:
    """Count values up to each limit, and above the last."""
    place = np.searchsorted(np.asarray(limits, dtype=float), values, side="left")
    counts = np.bincount(place, minlength=len(limits) + 1).tolist()
    names = [f"up to {limits[0]:g}"] + [f"{low:g} to {high:g}" for low, high in zip(limits, limits[1:], strict=False)]
    return list(zip([*names, f"above {limits[-1]:g}"], counts, strict=True))


def _encoded(image: np.ndarray) -> str:
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    file = io.BytesIO()
    picture.save(file, format="jpeg", quality=88)
    return base64.b64encode(file.getvalue()).decode()
