"""Captions: which text, which of several, tags and templates, all drawn from the sample's own generator."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cascade_train.batch import sample_seed
from cascade_train.data.captions import Captions, Tags
from cascade_train.data.sample import RawSample, UnreadableSampleError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading

PIXELS = np.zeros((1, 1, 3), dtype=np.uint8)


def raw(caption: str = "a cat", /, **values: Any) -> RawSample:
    return RawSample(image=PIXELS, caption=caption, key="0001", values=values)


def draws(captions: Captions, sample: RawSample, count: int = 400) -> Counter[str]:
    """Return how often each caption came in so many epochs."""
    generators = (torch.Generator().manual_seed(sample_seed(0, epoch, 7, "caption")) for epoch in range(count))
    return Counter(captions(sample, generator) for generator in generators)


def only(captions: Captions, sample: RawSample) -> str:
    """Return the caption that comes in every epoch."""
    (caption,) = draws(captions, sample, 20)
    return caption


def test_the_defaults_leave_captions_as_they_are() -> None:
    captions = Captions()
    assert captions.is_constant
    assert not captions.needs_values
    for text in ("a cat", "", "one\ntwo", "a, b, c", "{caption}", "猫 🐈"):
        assert only(captions, raw(text, caption="other")) == text


def test_a_key_names_the_text_and_dots_lead_into_it() -> None:
    values = {"caption": "new", "old": json.dumps({"og_caption": "older"}), "meta": {"title": "T"}, "a.b": "literal"}
    for key, expected in (("caption", "new"), ("old.og_caption", "older"), ("meta.title", "T"), ("a.b", "literal")):
        assert only(Captions(key=key), raw(**values)) == expected
        assert Captions(key=key).needs_values


def test_keys_are_drawn_by_their_weights_among_those_a_sample_has() -> None:
    captions = Captions(key={"long": 3, "txt": 1, "short": 4})
    assert not captions.is_constant
    counts = draws(captions, raw("own", long="long", short="short"), 1600)
    assert counts["own"] == pytest.approx(200, abs=50)
    assert counts["long"] == pytest.approx(600, abs=80)
    assert draws(captions, raw("own", long=None, short="short"), 1600)["own"] == pytest.approx(320, abs=60)


@pytest.mark.parametrize("text", ["one\n\n two \nthree", ["one", "two", "three"], {"one": 1, "two": 1, "three": 1}])
def test_one_of_several_captions_is_the_first_or_drawn(text: Any) -> None:
    sample = raw(text) if isinstance(text, str) else raw(captions=text)
    key = "txt" if isinstance(text, str) else "captions"
    first = Captions(key=key, choose="first")
    assert first.is_constant
    assert only(first, sample) == "one"
    drawn = Captions(key=key, choose="random")
    assert not drawn.is_constant
    counts = draws(drawn, sample, 900)
    assert set(counts) == {"one", "two", "three"}
    assert max(counts.values()) - min(counts.values()) < 100


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a photo of {}", "a photo of a cat"),
        ("{caption}, by {artist} ({year})", "a cat, by {Ann} (1907)"),
        ("a photo of [dog]", "a photo of [dog]"),
        ("{{{caption}}}", "{a cat}"),
        ("{meta.title}: {}", "T: a cat"),
    ],
)
def test_a_template_is_filled(template: str, expected: str) -> None:
    captions = Captions(template=template)
    assert captions.is_constant
    assert only(captions, raw(artist="{Ann}", year=1907, meta='{"title": "T"}')) == expected
    assert captions.needs_values is ("artist" in template or "meta" in template)


def test_a_template_reads_no_attributes() -> None:
    with pytest.raises(UnreadableSampleError, match="no text or number caption.__class__, which data.captions"):
        only(Captions(template="{caption.__class__}"), raw(caption=3))


def scored(folder: Path) -> Path:
    files = tars.samples(range(12))
    files += [(f"{key:04d}.json", json.dumps({"tags": [f"t{key}", "x", "y", "z"]}).encode()) for key in range(12)]
    return tars.write(folder / "a.tar", sorted(files))


def test_batches_carry_the_same_captions_on_any_ranks_and_workers(tmp_path: Path) -> None:
    captions = Captions(template="{caption}!", tags=Tags(key="tags", shuffle=True))
    path = scored(tmp_path)
    with loading(tars.webdataset(path, captions=captions)) as loader:
        whole = [tuple(text for micro in next(loader) for text in micro.captions) for _ in range(3)]
    assert all(text.startswith("picture ") and text.endswith("!") and " x" in text for step in whole for text in step)
    epochs: dict[str, set[str]] = {}
    for text in (text for step in whole for text in step):
        epochs.setdefault(text.split(",")[0], set()).add(text)
    assert max(map(len, epochs.values())) == 2
    parts: list[list[str]] = [[], [], []]
    for rank in range(2):
        source = pickle.loads(pickle.dumps(tars.webdataset(path, captions=captions, num_workers=rank)))
        with loading(source, rank=rank, ranks=2) as loader:
            for part in parts:
                part += [text for micro in next(loader) for text in micro.captions]
    assert [tuple(part) for part in parts] == whole


def test_a_missing_json_is_counted_where_captions_need_it(tmp_path: Path) -> None:
    files = [*tars.samples(range(40)), ("0000.json", b"{")]
    files += [(f"{key:04d}.json", b'{"title": "T"}') for key in range(4, 40)]
    path = tars.write(tmp_path / "a.tar", sorted(files))
    either = Captions(key={"title": 1.0, "txt": 1e-9})
    with loading(tars.webdataset(path, captions=either)) as loader:
        texts = [text for _ in range(5) for micro in next(loader) for text in micro.captions]
        assert set(texts) == {"T", "picture 1", "picture 2", "picture 3"}
        assert [each.reason for each in loader.skipped] == ["it has no readable json, which data.captions asks for"]


@pytest.mark.parametrize(
    ("captions", "values", "message"),
    [
        (Captions(key="a"), {"a": "half \ud800 a character"}, "its caption is no Unicode text: surrogates not allowed"),
        (Captions(template="{a}"), {"a": "\udfff"}, "its caption is no Unicode text"),
        (Captions(key="a", choose="random"), {"a": {"x": 10**400}}, "neither texts nor texts with a weight above 0"),
        (Captions(key="a", choose="first"), {"a": [["x" * 10**6]]}, r"weight above 0: \['xxx.*characters ..."),
        (Captions(key="a.b", choose="first"), {"a": "[" * 100_000}, "it lacks a.b"),
    ],
)
def test_whatever_a_sample_says_of_itself_makes_it_unreadable_at_worst(captions, values, message):
    with pytest.raises(UnreadableSampleError, match=message) as caught:
        only(captions, raw(**values))
    assert len(str(caught.value)) < 1000
