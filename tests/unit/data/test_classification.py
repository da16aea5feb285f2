"""Pictures of classes: which prompts a class has, in tars and in folders."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.captions import Captions
from cascade_train.data.classification import ClassFolders, ClassTars, Prompts
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading
from tests.unit.data.test_folder import write

DEFAULTS = {**tars.SMALL, "idx_to_prompt": None, "captions": Captions(key="prompts", choose="random")}


def class_tars(urls: Any, **options: Any) -> ClassTars:
    return ClassTars(urls=str(urls), **{**DEFAULTS, **options})


def class_folders(path: Path, **options: Any) -> ClassFolders:
    return ClassFolders(path=str(path), **{**DEFAULTS, **options})


def write_tar(path: Path, classes: list[str]) -> Path:
    files = []
    for number, name in enumerate(classes):
        files += [(f"{number:04d}.cls", name.encode()), (f"{number:04d}.png", tars.picture(tint=number))]
    return tars.write(path, files)


def prompts(folder: Path, given: Any) -> str:
    path = folder / "prompts.json"
    path.write_text(json.dumps(given))
    return str(path)


def fishes(folder: Path, **options: Any) -> ClassTars:
    """Make a source of 37 pictures in three classes, of which one has two prompts."""
    path = folder / "a.tar"
    if not path.exists():
        write_tar(path, [str(number % 3) for number in range(37)])
    given = prompts(folder, {"0": ["a tench", "a fish"], "1": "a dog", "2": ["a cat"]})
    return class_tars(path, idx_to_prompt=given, **options)


def test_prompts_are_drawn_for_each_epoch_and_follow_the_class(tmp_path: Path) -> None:
    source = fishes(tmp_path)
    seen: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    with loading(source, global_batch_size=37, micro_batch_size=37) as loader:
        for _ in range(4):
            (batch,) = next(loader)
            for row, caption in zip(batch.index_B.tolist(), batch.captions, strict=True):
                seen[row % 3].add(caption)
    assert seen == {0: {"a tench", "a fish"}, 1: {"a dog"}, 2: {"a cat"}}
    source = fishes(tmp_path, captions=Captions())
    source.open()
    assert source.read(0).caption == "a tench"
    assert pickle.loads(pickle.dumps(source)).read(0).caption == "a tench"
    assert source.read(1).values == {"class": "1", "prompts": ["a dog"]}


@pytest.mark.parametrize(
    ("given", "name", "number", "expected"),
    [
        (None, "great_white", None, ["great white"]),
        ({"7": "a hen"}, "7", None, ["a hen"]),
        ({"7": ["a", "b"]}, "7", 0, ["a", "b"]),
        ({"7": "a hen"}, "8", None, []),
        (["zero", "one"], "1", None, ["one"]),
        (["zero", "one"], "2", None, []),
        (["zero", "one"], "dog", None, []),
        (["zero", ["one", "1"]], "dog", 1, ["one", "1"]),
    ],
)
def test_prompts_are_found_by_name_or_number(given: Any, name: str, number: int | None, expected: list[str]) -> None:
    assert Prompts(given).of(name, number) == expected


def test_classes_without_prompts_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", ["0", "1"])
    with pytest.raises(ConfigError, match="prompts.json has no prompt for 1 of a.tar:0001"):
        class_tars(path, idx_to_prompt=prompts(tmp_path, ["zero"])).open()
    source = class_tars(path)
    source.open()
    source._prompts = Prompts({"0": "zero"})
    with pytest.raises(UnreadableSampleError, match="its class '1' has no prompt in"):
        source.read(1)
    write(tmp_path / "root/cat/a.png")
    write(tmp_path / "root/dog/a.png")
    with pytest.raises(ConfigError, match="has no prompt for 1 of 2 classes: dog"):
        class_folders(tmp_path / "root", idx_to_prompt=prompts(tmp_path, {"cat": "a cat"})).open()


def test_folders_are_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("dog/1.png", "dog/deep/2.png", "great_cat/1.png", "stray.png"):
        write(tmp_path / name)
    source = class_folders(tmp_path)
    index = source.open()
    assert [source.read(row).caption for row in range(len(index))] == ["dog", "dog", "great cat"]
    assert "left out 1 pictures that lie in no class's folder" in caplog.text
    by_order = class_folders(tmp_path, idx_to_prompt=prompts(tmp_path, [["a dog", "a hound"], "a cat"]))
    by_order.open()
    assert by_order.read(1).values == {"class": "dog", "prompts": ["a dog", "a hound"]}
    assert by_order.read(2).caption == "a cat"
    write(tmp_path / "flat/a.png")
    with pytest.raises(ConfigError, match="has no folders of classes: write CLASS/NAME.jpg below it"):
        class_folders(tmp_path / "flat").open()
