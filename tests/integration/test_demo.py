"""The demo's recipe teaches its token, and leaves the rest as it was."""

from __future__ import annotations

import pytest

from bench.demo import BASE, Table, judged, missed, new_scenes, other_scenes, paint, prompts
from cascade_train.results.find import find_model
from tests.integration.runs import train

pytestmark = pytest.mark.slow

NEW, OTHERS = 10, 10


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, Table]:
    """What the whole cascade paints before and after, judged."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    steps = ("train.max_steps=150", "train.global_batch_size=16", "checkpoint.every_steps=null")
    run = train(folder, "experiment=tiny_token", *steps, "sample.every_steps=null")
    cfg = find_model(str(run), key="run", part=None).cfg
    truth, others = new_scenes(cfg, NEW), other_scenes(cfg, OTHERS)
    captions = prompts(truth, cfg.data.source.names) + others.captions
    assert sum("[sides]" in caption for caption in captions) == NEW
    sources = {"before": BASE, "after": str(run)}
    return judged(truth, others, {name: paint(source, BASE, captions, 0) for name, source in sources.items()})


def test_the_concept_is_in_no_picture_before_and_in_most_after(tables: tuple[Table, Table]) -> None:
    new, _ = tables
    assert new["before"]["position"] == 0
    assert new["after"]["position"] >= 0.8
    assert new["after"]["background"] >= 0.9


def test_other_prompts_still_give_what_they_say(tables: tuple[Table, Table]) -> None:
    _, rest = tables
    for name in ("colour", "position", "background"):
        assert rest["after"][name] >= rest["before"][name] - 1 / OTHERS
        assert rest["after"][name] > 0.85


def test_what_falls_short_is_named() -> None:
    good = {"colour": 0.9, "position": 1.0, "background": 1.0}
    never = good | {"position": 0.0}
    assert missed({"before": never, "after": good}, {"before": good, "after": good}) == []
    assert missed({"before": good, "after": never}, {"before": good, "after": never}) == [
        "the concept is in 100% of the pictures before",
        "the concept is in 0% of the pictures after",
        "position lost 100.0 points",
    ]
