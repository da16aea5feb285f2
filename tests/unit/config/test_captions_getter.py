"""The original's `captions_getter` as keys of data.captions, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cascade_train.config.captions_getter import caption_keys
from cascade_train.data.captions import Captions
from cascade_train.data.sample import RawSample

JSON = {"caption": "a cat", "artist": "Ann", "old_caption": '{"og_caption": "cat"}', "meta": {"title": "cats"}}


@pytest.mark.parametrize(
    ("part", "expression", "keys"),
    [
        ("txt", "identity", {}),
        ("txt", "lambda x: identity(x)", {}),
        ("json", "captions_getter", {"key": {"caption": 0.95, "old_caption.og_caption": 0.05}}),
        ("json", "lambda x: x['caption']", {"key": "caption"}),
        ("json", "lambda x: json.loads(x)['meta'].get('title')", {"key": "meta.title"}),
        ("json", "lambda x: json.loads(x['old_caption'])['og_caption']", {"key": "old_caption.og_caption"}),
        ("txt", "lambda t: 'a photo of ' + t", {"template": "a photo of {caption}"}),
        ("txt", "lambda t: f'{t}, {{4k}}'", {"template": "{caption}, {{4k}}"}),
        ("json", "lambda x: f\"{x['caption']}, by {x['artist']}\"",
         {"key": "caption", "template": "{caption}, by {artist}"}),
        ("json", "lambda x: x['artist'] + ': ' + x['caption']", {"key": "caption", "template": "{artist}: {caption}"}),
        ("json", "lambda x: x['artist'] + ' ' + x['meta']['title']",
         {"key": "artist", "template": "{caption} {meta.title}"}),
        ("json", "lambda x: x['caption'] if np.random.rand() < 0.9 else x['artist']",
         {"key": {"caption": 0.9, "artist": 0.1}}),
        ("json", "lambda x: x['a'] if random.random() < .5 else x['b'] if random.random() < .2 else x['c']",
         {"key": {"a": 0.5, "b": 0.1, "c": 0.4}}),
    ],
)  # fmt: skip
def test_what_keys_weights_and_templates_can_say_is_taken_over(
    part: str, expression: str, keys: dict[str, Any]
) -> None:
    found = caption_keys([part, expression])
    assert found == {f"data.captions.{key}": value for key, value in keys.items()}
    Captions(**keys)


@pytest.mark.parametrize(
    ("part", "expression"),
    [
        ("json", "identity"),
        ("caption", "identity"),
        ("txt", "captions_getter"),
        ("txt", "lambda t: t['caption']"),
        ("json", "lambda x: x"),
        ("json", "lambda x: x['caption'].lower()"),
        ("json", "lambda x: f\"{x['caption']!r}\""),
        ("json", "lambda x: f\"{x['score']:.2f}\""),
        ("json", "lambda x: x['caption'] if x['score'] > 4 else x['artist']"),
        ("json", "lambda x: x['caption'] + '!' if np.random.rand() < 0.9 else x['artist']"),
        ("json", "lambda x: f\"{x['a b']}, {x['c']}\""),
        ("json", "lambda x, y: x['caption']"),
        ("json", "lambda x: 'always this'"),
        ("json", "lambda x: __import__('os').system('touch ran')"),
        ("json", "((("),
        ("json", "lambda x: " + "(" * 500 + "x" + ")" * 500),
    ],
)
def test_what_they_cannot_say_is_refused_and_never_run(
    part: str, expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert caption_keys([part, expression]) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("getter", [[], ["txt"], ["json", "captions_getter", 3], [None, None]])
def test_a_list_of_another_form_is_refused(getter: list[Any]) -> None:
    assert caption_keys(getter) is None


@pytest.mark.parametrize(
    ("expression", "caption"),
    [
        ("x['caption']", "a cat"),
        ("x['artist'] + ': ' + x['caption']", "Ann: a cat"),
        ("f\"{x['artist']} on {x['meta']['title']}\"", "Ann on cats"),
        ("json.loads(x['old_caption'])['og_caption']", "cat"),
    ],
)
def test_the_captions_are_those_of_the_expression(expression: str, caption: str) -> None:
    found = caption_keys(["json", f"lambda x: {expression}"])
    captions = Captions(**{key.rpartition(".")[2]: value for key, value in found.items()})
    raw = RawSample(image=None, caption="", key="0", values=JSON)
    assert captions(raw, torch.Generator().manual_seed(0)) == caption
