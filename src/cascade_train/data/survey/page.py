"""What `cascade-train inspect` shows: findings as lines of text, and all of it on one HTML page without other files."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

from cascade_train.batch import Batch
from cascade_train.data.survey.survey import Survey

NAMES_IN_TEXT = 5
NAMES_ON_PAGE = 200
SIDES_PX = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
MEGAPIXELS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)
THUMBNAIL_PX = 192

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td { padding: 1px 12px 1px 0; vertical-align: top; }
.bar { background: #4878a8; height: 0.8em; display: inline-block; } .number { text-align: right; }
.finding { background: #fbf1d7; padding: 4px 10px; margin: 4px 0; } .fine { background: #e6f2e4; }
figure { display: inline-block; width: 192px; margin: 0 12px 12px 0; vertical-align: top; font-size: 0.8em; }
pre, code { font-size: 0.85em; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something worth a look.

    Attributes:
        text: what, in one sentence.
        names: of the samples, or more text about each.
    """

    text: str
    names: tuple[str, ...] = ()

    def line(self) -> str:
        """Return it as text, with the first names."""
        shown = "; ".join(self.names[:NAMES_IN_TEXT]) + ("; ..." if len(self.names) > NAMES_IN_TEXT else "")
        return f"{self.text}{': ' if shown else ''}{shown}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """All that is known.

    Attributes:
        title: what was looked at.
        survey: of the samples.
        tokens: of each caption, start and end included, in the order of the survey.
        max_tokens: of the model's text encoder.
        counted_by: which tokenizer counted.
        log: what opening the data said: what was left out, which filters keep how many.
        batch: some samples of one training size; None = none could be made.
    """

    title: str
    survey: Survey
    tokens: tuple[int, ...]
    max_tokens: int
    counted_by: str
    log: tuple[str, ...]
    batch: Batch | None

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
        """Return the report as text."""
        findings = [f"! {finding.line()}" for finding in self.findings()]
        return [self.title, *self.log, *self.counts(), *(findings or ["nothing found that is worth a look"])]

    def page(self) -> str:
        """Return the report as one HTML page."""
        found, known = self.survey, self.survey.width_N > 0
        width_N, height_N = found.width_N[known], found.height_N[known]
        sizes = [(f"{each.height} x {each.width}", each.samples) for each in found.buckets]
        limits = [*range(10, self.max_tokens, 10), self.max_tokens]
        common = Counter(found.captions.values()).most_common(10)
        parts = [
            _section("Counts", _list(self.counts())),
            _section("Findings", "".join(map(_finding, self.findings())) or _NOTHING),
            _section("What opening the data said", f"<pre>{escape(chr(10).join(self.log)) or 'nothing'}</pre>"),
            _section("Training sizes (height x width)", _bars(sizes)),
            _section("Shorter side, pixels", _bars(_histogram(np.minimum(width_N, height_N), SIDES_PX))),
            _section("Megapixels", _bars(_histogram(width_N * height_N / 1e6, MEGAPIXELS))),
            _section("Width / height", _bars(_histogram(width_N / height_N, RATIOS))),
            _section(f"Tokens of captions, by {self.counted_by}", _bars(_histogram(np.array(self.tokens), limits))),
            _section("Commonest captions", _bars([(text[:200], count) for text, count in common])),
            _section("A batch", "" if self.batch is None else _pictures(self.batch)),
        ]
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{escape(self.title)}</h1>{''.join(parts)}</body></html>\n"
        )


_NOTHING = '<p class="finding fine">Nothing found that is worth a look.</p>'


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _finding(finding: Finding) -> str:
    shown = [*finding.names[:NAMES_ON_PAGE], *(["..."] if len(finding.names) > NAMES_ON_PAGE else [])]
    details = f"<details><summary>which</summary>{_list(shown)}</details>" if shown else ""
    return f'<div class="finding">{escape(finding.text)}{details}</div>'


def _histogram(values: np.ndarray, limits: Sequence[float]) -> list[tuple[str, int]]:
    """Count values up to each limit, and above the last."""
    place = np.searchsorted(np.asarray(limits, dtype=float), values, side="left")
    counts = np.bincount(place, minlength=len(limits) + 1).tolist()
    names = [f"up to {limits[0]:g}"] + [f"{low:g} to {high:g}" for low, high in zip(limits, limits[1:], strict=False)]
    return list(zip([*names, f"above {limits[-1]:g}"], counts, strict=True))


def _bars(rows: Sequence[tuple[str, int]]) -> str:
    most = max((count for _, count in rows), default=0)
    lines = [
        f'<tr><td>{escape(name)}</td><td class="number">{count}</td>'
        f'<td><span class="bar" style="width:{300 * count / max(1, most):.0f}px"></span></td></tr>'
        for name, count in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def _pictures(batch: Batch) -> str:
    if batch.image_BCHW is None:
        return "<p>The data holds no pictures, but what a model made of them.</p>"
    pictures = zip(batch.image_BCHW.numpy(), batch.keys, batch.captions, strict=True)
    return "".join(
        f'<figure><img alt="" src="data:image/jpeg;base64,{_encoded(image)}"><figcaption><b>{escape(key)}</b><br>'
        f"{escape(caption)}</figcaption></figure>"
        for image, key, caption in pictures
    )


def _encoded(image: np.ndarray) -> str:
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    file = io.BytesIO()
    picture.save(file, format="jpeg", quality=88)
    return base64.b64encode(file.getvalue()).decode()
