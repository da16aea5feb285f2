"""A survey as `cascade-train inspect` reports it: lines of text, one HTML page, and a list for data.quarantine.

Findings come in the order of what they cost. The page is laid out in report.html and needs no other files.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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

    text: str  # one sentence
    cost: float = 0.0  # share of an epoch that is lost by it, estimated from what was read, in [0, 1]
    remedy: str = ""  # empty = none that one key gives
    names: tuple[str, ...] = ()  # the samples, or more text about each
    leave_out: tuple[tuple[str, str], ...] = ()  # samples that a training may go without, and why

    def first(self, count: int) -> list[str]:
        """Return the first names."""
        return [*self.names[:count], *(["..."] if len(self.names) > count else [])]


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
    unfilled: int = 0  # samples of an epoch that fill no batch of their shape and are dropped

    def counts(self) -> list[str]:
        """Return how many samples there are, and what their captions are like, in lines."""
        found, cropped = self.survey, 100 * self.survey.shapes[0].cropped
        lines = [
            f"{found.samples} samples in an epoch, {found.pictures} different pictures",
            f"{found.read} of them read and decoded",
            f"{len(found.buckets)} training sizes; {cropped:.1f} % of a picture is cut away on average",
            f"{sum(each.enlarged for each in found.buckets)} of {found.samples} samples are enlarged",
        ]
        if self.tokens:
            low, middle, high = np.percentile(self.tokens, (5, 50, 95)).round().astype(int).tolist()
            different = len(set(found.captions.values()))
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
        return {**self._of_pictures(), **self._of_captions(), **self._of_shapes()}

    def _of_pictures(self) -> dict[str, Finding]:
        found, read = self.survey, max(1, self.survey.read)
        same = tuple(_joined(" = ", names) for names in found.twice)
        near = tuple(_joined(" ~ ", names) for names in found.near)
        copies, likes = (
            tuple((name, f"{word} {names[0]}") for names in groups for name in names[1:])
            for groups, word in ((found.twice, "the same as"), (found.near, "looks like"))
        )
        contents = f"{len(same)} contents come more than once, under several names"
        groups = f"{len(near)} groups of pictures look alike"
        turned = f"{len(found.rotated)} pictures are turned by their EXIF tag; they are trained upright"
        return {
            "unreadable": Finding(
                text=f"{len(found.unreadable)} cannot be read",
                cost=len(found.unreadable) / read,
                remedy=self._stop(len(found.unreadable), read),
                names=tuple(f"{name} ({why})" for name, why in found.unreadable),
                leave_out=found.unreadable,
            ),
            "duplicates": Finding(text=contents, cost=len(copies) / read, names=same, leave_out=copies),
            "near": Finding(text=groups, cost=len(likes) / read, names=near, leave_out=likes),
            "rotated": Finding(text=turned, names=found.rotated),
        }

    def _stop(self, unreadable: int, read: int) -> str:
        """Return that a run stops at so many unreadable samples of those that were read, and what helps; else none."""
        if unreadable <= most_unreadable(read, self.max_unreadable_share):
            return ""
        return (
            f"a run stops, since data.max_unreadable_share={self.max_unreadable_share:g} allows fewer: leave them out"
            f" by data.quarantine=<list>, or allow data.max_unreadable_share={sufficient_share(unreadable, read):g}"
        )

    def _of_captions(self) -> dict[str, Finding]:
        captions = self.survey.captions
        counts = zip(captions, self.tokens, strict=True)
        long = [(name, count) for name, count in counts if count > self.max_tokens]
        empty = tuple(name for name, caption in captions.items() if not caption.strip())
        return {
            "empty": Finding(
                text=f"{len(empty)} captions are empty",
                cost=len(empty) / max(1, self.survey.read),
                names=empty,
                leave_out=tuple((name, "its caption is empty") for name in empty),
            ),
            "long": Finding(
                text=f"{len(long)} captions have more than {self.max_tokens} tokens, by {self.counted_by}",
                cost=sum(1 - self.max_tokens / count for _, count in long) / max(1, self.survey.read),
                remedy="model.text_encoder.long_captions=true takes three times as many" if self.can_take_more else "",
                names=tuple(f"{name} ({count})" for name, count in long),
                leave_out=tuple((name, f"its caption has {count} tokens") for name, count in long),
            ),
        }

    def _of_shapes(self) -> dict[str, Finding]:
        found = self.survey
        unknown, own = int((found.width_N == 0).sum()), found.shapes[0]
        best = min(found.shapes, key=lambda each: each.much)
        cropped = f"{own.much} samples lose more than {MUCH:.0%} to cropping"
        better = f"data.aspect_ratios={best.aspect_ratios} leaves {best.much} of them" if best.much < own.much else ""
        return {
            "header": Finding(f"{unknown} have no readable header: unknown size", unknown / max(1, found.pictures)),
            "cropped": Finding(text=cropped, cost=own.cropped if own.much else 0.0, remedy=better),
            "unfilled": Finding(
                text=f"{self.unfilled} samples fill no batch of their shape and are dropped, other ones each epoch",
                cost=self.unfilled / max(1, found.samples),
                remedy="data.leftover=carry trains them in the next epoch",
            ),
        }

    def findings(self) -> list[Finding]:
        """Return what is worth a look, what costs most first."""
        some = [each for each in self.all_findings.values() if not each.text.startswith("0 ")]
        return sorted(some, key=lambda each: -each.cost)

    def lines(self) -> list[str]:
        """Return the report as text, with the first names of each finding."""
        findings = [_line_of(each) for each in self.findings()]
        return [self.title, *self.log, *self.counts(), *(findings or ["nothing found that is worth a look"])]

    def quarantine(self, faults: Sequence[str]) -> tuple[str, int]:
        """Return the samples of some findings, once each with the first reason, in lines for `data.quarantine`.

        A name of several samples is listed only where all of them are found; and how many others are not listed.
        """
        reasons: dict[str, str] = {}
        for fault in faults:
            for name, why in self.all_findings[fault].leave_out:
                reasons.setdefault(name, why)
        shared = self.survey.shared
        needed = {name for numbered, name in shared.items() if numbered not in reasons}
        listed = {shared.get(name, name): why for name, why in reasons.items() if shared.get(name) not in needed}
        lines = "".join(json.dumps({"sample": name, "reason": why}) + "\n" for name, why in listed.items())
        return lines, sum(shared.get(name) in needed for name in reasons)

    def rows(self) -> str:
        """Return a line of JSON for each caption: its sample, what it is, where it came from, and its tokens."""
        texts = self.survey.texts.items()
        told = [
            {"sample": name, "caption": text.caption, "from": text.origin, "tokens": count}
            for (name, text), count in zip(texts, self.tokens, strict=True)
        ]
        return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in told)

    def page(self) -> str:
        """Return the report as one HTML page."""
        found, known = self.survey, self.survey.width_N > 0
        width_N, height_N = found.width_N[known], found.height_N[known]
        limits = [*range(10, self.max_tokens, 10), self.max_tokens]
        captions = list(found.captions.values())
        words = Counter(word for caption in captions for word in set(re.findall(r"\w+", caption.lower())))
        sizes = [(f"{each.height} x {each.width}", each.samples) for each in found.buckets]
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


def _joined(sign: str, names: Sequence[str]) -> str:
    more = [f"{len(names) - NAMES_IN_TEXT} more"] if len(names) > NAMES_IN_TEXT else []
    return sign.join([*names[:NAMES_IN_TEXT], *more])


def _line_of(finding: Finding) -> str:
    cost = f" [{100 * finding.cost:.3g} % of an epoch]" if finding.cost else ""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    names = f": {'; '.join(finding.first(NAMES_IN_TEXT))}" if finding.names else ""
    return f"!{cost} {finding.text}{remedy}{names}"


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
