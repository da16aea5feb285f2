"""Pictures and captions that change behind a cache or a run: refused and named, or gone on with where that is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cascade_train.__main__ import launch
from tests.integration.runs import NARROW, SMALL, read_metrics, train
from tests.unit.data import tars

pytestmark = pytest.mark.slow

RUN = ("task=finetune", *NARROW, "train.global_batch_size=4", "data.num_workers=0")
GOES_ON = "data.on_change=restart"


def write(folder: Path, row: int, caption: str | None = None, tint: int | None = None, side: int = 96) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{row}.png").write_bytes(tars.picture(side, side, tint=row if tint is None else tint))
    (folder / f"{row}.txt").write_text(f"picture {row}" if caption is None else caption)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for row in range(8):
        write(tmp_path / "data", row)
    return tmp_path / "data"


class Told:
    """Commands, and what they say and log on one line."""

    def __init__(self, capfd: Any, caplog: Any) -> None:
        self.capfd, self.caplog = capfd, caplog
        caplog.set_level("INFO")

    def by(self, *arguments: str, code: int) -> str:
        self.caplog.clear()
        assert launch(list(arguments)) == code
        captured = self.capfd.readouterr()
        return " ".join((self.caplog.text + captured.err + captured.out).split())

    def by_cache(self, folder: Path, *data: str, code: int = 0) -> str:
        return self.by("cache", "model=c_tiny", *RUN, *data, f"out={folder}", "unit_samples=4", code=code)

    def by_training(self, folder: Path, *arguments: str, code: int) -> str:
        command = (*SMALL, *RUN, "data=cached", f"data.path={folder}", "train.max_steps=1", *arguments)
        return self.by(*command, f"run.dir={folder.parent / 'run'}", code=code)


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Told:
    return Told(capfd, caplog)


def tar(path: Path, word: str) -> Path:
    pairs = [[(f"{row}.png", tars.picture(96, 96, tint=row)), (f"{row}.txt", b"%s %d" % (word.encode(), row))]
             for row in range(8)]  # fmt: skip
    return tars.write(path, [file for pair in pairs for file in pair])


def test_a_cache_of_a_mixture_is_refused_where_a_picture_was_replaced_and_made_again_on_demand(
    data: Path, tmp_path: Path, told: Told
) -> None:
    mixture = ("data=mixture", "+data@data.sources.a=folder", f"data.sources.a.path={data}")
    told.by_cache(tmp_path / "cache", *mixture)
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.tar")}
    write(data, 6, tint=99, side=120)
    refused = "made of data that changed since: mixture:a/data:6.png. Remedy: put it back"
    assert refused in told.by_cache(tmp_path / "cache", *mixture, code=2)
    named = ("+data@data.source=mixture", "+data@data.source.sources.a=folder", f"data.source.sources.a.path={data}")
    assert refused.partition(" Remedy")[0] in told.by_training(tmp_path / "cache", *named, code=2)
    assert not (tmp_path / "run").exists()
    text = told.by_cache(tmp_path / "cache", *mixture, GOES_ON)
    assert "1 of 2 units are there already" in text
    after = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.tar")}
    assert [name for name in before if after[name] != before[name]] == ["samples-000001.tar"]
    assert "is complete" in told.by_cache(tmp_path / "cache", *mixture)
    told.by_training(tmp_path / "cache", *named, code=0)


def test_a_cache_of_a_folder_whose_caption_was_edited_trains_only_on_demand(
    data: Path, tmp_path: Path, told: Told
) -> None:
    source = ("data=folder", f"data.path={data}")
    told.by_cache(tmp_path / "cache", *source)
    for path in data.iterdir():
        path.touch()
    assert "2 of 2 units are there already" in told.by_cache(tmp_path / "cache", *source)
    (data / "3.txt").write_text("another caption")
    assert "changed since: data:3.png. Remedy: put it back" in told.by_cache(tmp_path / "cache", *source, code=2)
    named = ("+data@data.source=folder", f"data.source.path={data}")
    assert "changed since: data:3.png. Remedy: run cascade-train cache again" in told.by_training(
        tmp_path / "cache", *named, code=2
    )
    assert "data that changed since: data:3.png." in told.by_training(tmp_path / "cache", *named, GOES_ON, code=0)
    write(data, 3, tint=99, side=120)
    assert "holds another cache: data:3.png." in told.by_cache(tmp_path / "cache", *source, code=2)
    shutil.rmtree(data)
    told.by_training(tmp_path / "cache", "train.max_steps=2", code=0)


def test_a_resume_is_refused_where_captions_changed_and_begins_another_epoch_on_demand(
    tmp_path: Path, told: Told
) -> None:
    source = ("data=webdataset", f"data.urls={tar(tmp_path / 'a.tar', 'old')}")
    run = train(tmp_path / "run", *RUN, *source, "train.max_steps=1")
    shutil.copytree(run, tmp_path / "same")
    tar(tmp_path / "a.tar", "old")
    train(tmp_path / "same", *RUN, *source, "train.max_steps=3")
    tar(tmp_path / "a.tar", "new")
    command = (*SMALL, *RUN, *source, "train.max_steps=3", f"run.dir={run}")
    text = told.by(*command, code=2)
    changed = "the files behind data changed (a.tar:0, a.tar:1, a.tar:2, a.tar:3, a.tar:4 and 3 more); put them back"
    assert f"{changed}, or start another run, or end the epoch here by data.on_change" in text
    assert f"The data changed ({changed}); epoch 1 begins" in told.by(*command, GOES_ON, code=0)
    other, same = read_metrics(run), read_metrics(tmp_path / "same")
    assert other[0] == same[0]
    assert [row["loss"] for row in other[1:]] != [row["loss"] for row in same[1:]]


def test_a_run_goes_on_in_its_epoch_with_a_copy_of_its_data_elsewhere(data: Path, tmp_path: Path, told: Told) -> None:
    run = train(tmp_path / "run", *RUN, "data=folder", f"data.path={data}", "train.max_steps=1")
    shutil.copytree(run, tmp_path / "same")
    train(tmp_path / "same", *RUN, "data=folder", f"data.path={data}", "train.max_steps=3")
    moved = shutil.copytree(data, tmp_path / "other" / "data", copy_function=shutil.copyfile)
    shutil.rmtree(data)
    command = (*SMALL, *RUN, "data=folder", f"data.path={moved}", "train.max_steps=3", f"run.dir={run}")
    assert f"data.path: {data} -> {moved} Remedy: another run.name" in told.by(*command, code=2)
    assert "begins" not in told.by(*command, GOES_ON, code=0)
    assert read_metrics(run) == read_metrics(tmp_path / "same")


def test_what_a_killed_process_left_in_a_cache_is_removed(tmp_path: Path, told: Told) -> None:
    killing = (
        "import os, sys; from cascade_train.assembly import cache_making; from cascade_train.data import cached\n"
        "cached.np.savez = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "from cascade_train.__main__ import launch; launch(sys.argv[1:])"
    )
    told.by_cache(tmp_path / "cache", "data=shapes", "data.samples=8", "task_count=2")
    arguments = ("model=c_tiny", *RUN, "data=shapes", "data.samples=8", "unit_samples=4", f"out={tmp_path / 'cache'}")
    killed = subprocess.run([sys.executable, "-c", killing, "cache", *arguments], check=False)
    assert killed.returncode == -9
    left = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert len(left) == 2
    for path in left:
        os.utime(path, (1, 1))
    told.by_cache(tmp_path / "cache", "data=shapes", "data.samples=8", "task_count=2")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
