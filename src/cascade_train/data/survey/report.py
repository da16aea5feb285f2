"""A survey as `cascade-train inspect` reports it: lines of text, one HTML page, and a list for data.quarantine.

Findings come in the order of what they cost. The page is laid out in report.html and needs no other files.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from PIL import Image

from cascade_train.batch import Batch
from cascade_train.data.sample import most_unreadable, sufficient_share
from cascade_train.data.survey.look import MUCH, Survey

NAMES_IN_TEXT = 5
NAMES_ON_PAGE = 200
LONGEST = 200
"""Characters of a caption or word on the page."""
WORDS = 20
SIDES_PX = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
MEGAPIXELS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)
THUMBNAIL_PX = 192
PAGE = Path(__file__).with_name("report.html")


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
        longer = "model.text_encoder.long_captions=true takes three times as many" if self.can_take_more else ""
        turned, converted = (dict.fromkeys(rows, "") for rows in (survey.rotated, survey.converted))
        best = min(survey.shapes, key=lambda shape: shape.much)
        better = f"data.aspect_ratios={best.aspect_ratios} leaves {best.much} of them"
        over, fewer = f"more than {self.max_tokens} tokens, by {self.counted_by}", best.much < chosen.much
        return {
            "unreadable": Finding(
                "cannot be read", unreadable, len(unreadable) / read, self._stop(len(unreadable), read)
            ),
            "duplicates": Finding("pictures have the content of another one", copies, len(copies) / read),
            "empty": Finding("captions are empty", empty, len(empty) / read),
            "long": Finding(f"captions have {over}", long, lost / read, longer),
            "rotated": Finding("pictures are turned by their orientation tag; they are trained upright", turned),
            "converted": Finding("pictures have another colour profile; they are trained as sRGB", converted),
            "header": Finding("have no readable header: unknown size", unknown, unknown / max(1, survey.pictures)),
            "cropped": Finding(
                f"samples lose more than {MUCH:.0%} to cropping",
                chosen.much,
                chosen.cropped if chosen.much else 0.0,
                better if fewer else "",
            ),
        }

    def _stop(self, unreadable: int, read: int) -> str:
        """That a run stops at so many unreadable samples of those that were read, and what helps; else none."""
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
        some = [finding for finding in self.all_findings.values() if finding.rows]
        return sorted(some, key=lambda finding: -finding.cost)

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
        """The samples of some findings, once each with the first reason, in lines for `data.quarantine`.

        A name of several samples is listed only where all of them are found; and how many others are not listed.
        """
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
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    file = io.BytesIO()
    picture.save(file, format="jpeg", quality=88)
    return base64.b64encode(file.getvalue()).decode()
