"""Runs on tars behind s3:// and on streams, through the entry point."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from hydra.utils import instantiate

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.assembly import run as build
from tests.integration.runs import SMALL, read_metrics, train
from tests.unit.commands.test_recipe import official
from tests.unit.commands.test_recipe import run as run_import
from tests.unit.config.composing import checked
from tests.unit.config.defaults import RECIPES
from tests.unit.config.test_every_option import CONTROLNETS
from tests.unit.data import tars
from tests.unit.data.loopback import BUCKET, point_at, s3_server

PREFIX = f"s3://{BUCKET}/set/"
AS_WRITTEN = ["s3://path/to/your/first/dataset/on/s3", "s3://path/to/your/second/dataset/on/s3"]
OFFICIAL_FILES = {name: official(name, webdataset_path=AS_WRITTEN) for name in RECIPES}
"""The original's eleven training files, with the paths of data that they have."""
DATA = (
    *SMALL_NETWORK,
    "task=finetune",
    "data=webdataset",
    "data.num_workers=0",
    "train.global_batch_size=4",
    "train.micro_batch_size=4",
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as running:
        yield running


def squeezed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(3):
        tars.write(tmp_path / f"{shard}.tar", tars.samples(range(shard * 7, shard * 7 + 7)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.s3
def test_a_run_on_a_prefix_and_a_pipe_goes_on_with_what_it_began_with(
    folder: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point_at(monkeypatch, endpoint)
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    for name, content in (("0.tar", (folder / "0.tar").read_bytes()), ("1.tar.gz", squeezed(folder / "1.tar"))):
        client.put_object(Bucket=BUCKET, Key=f"set/{name}", Body=content)
    urls = f'data.urls=["pipe:cat {folder}/2.tar","{PREFIX}"]'
    options = [*DATA, urls, "data.buffer_samples=3", "checkpoint.every_steps=1"]
    whole = train(folder / "whole", *options, "train.max_steps=2")
    part = train(folder / "part", *options, "train.max_steps=1")
    listed = json.loads((part / "listing.json").read_text())
    assert [item["url"] for item in listed[PREFIX]] == [f"{PREFIX}0.tar", f"{PREFIX}1.tar.gz"]
    client.put_object(Bucket=BUCKET, Key="set/3.tar", Body=b"")
    train(part, *options, "train.max_steps=2")
    assert read_metrics(part) == read_metrics(whole)
    assert "holds 1 more tars than when the run began; they are not used" in caplog.text
    assert "skips the 4 samples that were seen" in caplog.text
    files = [path for path in part.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not any(b"never-shown" in path.read_bytes() for path in files)


def test_epochs_of_streams_are_refused_before_anything_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*DATA, f'data.urls="pipe:cat {folder}/1.tar"', "train.max_epochs=1", f"run.dir={folder}/run"]
    assert launch([*SMALL, *arguments]) == 2
    assert "whose length is unknown: give train.max_steps" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_ranks_that_see_different_data_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = build.from_every_rank
    monkeypatch.setattr(build, "from_every_rank", lambda work: [*real(work), "what another rank sees"])
    assert launch([*SMALL, *DATA, f"data.urls={folder}/1.tar", f"run.dir={folder}/run"]) == 1
    assert "the ranks see different data: files changed while the run began" in capsys.readouterr().err


def test_a_failing_command_ends_a_run_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"pipe:cat {folder}/1.tar; echo the bucket is gone >&2; exit 7"
    assert launch([*SMALL, *DATA, f'data.urls="{command}"', f"run.dir={folder}/run"]) == 1
    told = capsys.readouterr().err
    assert f"pipe:cat {folder}/1.tar <redacted> ended with code 7: the bucket is gone" in told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.s3
def test_every_official_file_as_written_finds_its_data(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "wandb" else find_spec(name))
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket="path")
    for number, place in enumerate(("first", "second")):
        files = [*tars.samples([number]), (f"{number:04d}.json", b'{"width": 800, "height": 900}')]
        content = tars.write(tmp_path / f"{number}.tar", files).read_bytes()
        client.put_object(Bucket="path", Key=f"to/your/{place}/dataset/on/s3/deep/{number}.tar", Body=content)
    for name, source in OFFICIAL_FILES.items():
        code, conf = run_import(tmp_path, source, "overwrite=true")
        cfg = checked("experiment=mine", *CONTROLNETS.get(name, []), "data.listing=null", extra=conf)
        assert code == 0
        assert len(instantiate(cfg.data, _convert_="all").open()) == 2, name
    assert len(OFFICIAL_FILES) == 11
