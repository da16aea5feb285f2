"""Tars behind s3://, through a real server of the protocol: the same samples, order and position as from a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from cascade_train.data.tar import index as tar_index
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import contents
from tests.unit.data.loopback import BUCKET, point_at, s3_server

pytestmark = pytest.mark.s3

PREFIX = f"s3://{BUCKET}/set/"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as running:
        yield running


class Bucket:
    """What the tests do to the bucket."""

    def __init__(self) -> None:
        self.client = boto3.session.Session().client("s3")
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, path: Path, key: str) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())

    def put_all(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.tar")):
            self.put(path, f"set/{path.name}")

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def empty(self) -> None:
        for entry in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
            self.delete(entry["Key"])


@pytest.fixture(scope="module")
def shared_bucket(endpoint: str) -> Bucket:
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, endpoint)
        return Bucket()


@pytest.fixture
def bucket(shared_bucket: Bucket, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    point_at(monkeypatch, endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    yield shared_bucket
    shared_bucket.empty()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, keys in enumerate([range(8), range(8, 13), range(13, 29)]):
        files = tars.samples(keys)
        if shard == 0:
            files.insert(1, ("0000.big.bin", bytes(200_000)))
        tars.write(tmp_path / f"part-{shard}.tar", files)
    return tmp_path


@pytest.mark.slow
def test_remote_tars_give_the_batches_of_local_ones(bucket: Bucket, folder: Path) -> None:
    bucket.put_all(folder)
    local, remote = tars.webdataset(folder / "part-{0..2}.tar"), tars.webdataset(f"{PREFIX}part-{{0..2}}.tar")
    assert local.open().digest == remote.open().digest
    expected = contents(local, 3)
    # The server's threads live in this process: a forked worker could inherit a lock that one of them holds.
    apart = tars.webdataset(f"{PREFIX}part-{{0..2}}.tar", num_workers=1, worker_start="forkserver")
    assert contents(apart, 3) == expected
    mixed = [str(folder / "part-0.tar"), f"{PREFIX}part-1.tar", f"file:{folder}/part-2.tar"]
    assert contents(tars.webdataset(mixed), 3) == expected


def test_a_sample_is_read_with_one_request_where_its_parts_are_close(
    bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_all(folder)
    source = tars.webdataset(f"{PREFIX}part-0.tar")
    source.open()
    asked = []
    read = source._stores[0].read
    monkeypatch.setattr(source._stores[0], "read", lambda item, *place: asked.append(place) or read(item, *place))
    assert source.read(1).caption == "picture 1"
    assert len(asked) == 1
    assert source.read(0).caption == "picture 0"  # 200 kB lie between its parts
    assert len(asked) == 3
    source.prefetch([3, 2])
    assert [source.read(row).caption for row in (2, 3, 5)] == ["picture 2", "picture 3", "picture 5"]
    assert len(asked) == 6


def test_the_index_of_a_remote_tar_is_kept_until_it_changes(
    bucket: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_all(folder)
    source = tars.webdataset(f"{PREFIX}part-0.tar")
    assert len(source.open()) == 8
    kept = sorted((tmp_path / "home/cascade_train/index").iterdir())
    assert [path.suffix for path in kept] == [".npz"]
    with monkeypatch.context() as patch:
        patch.setattr(tar_index, "scan_shard", None)
        assert len(tars.webdataset(f"{PREFIX}part-0.tar").open()) == 8
    bucket.put(folder / "part-1.tar", "set/part-0.tar")
    assert len(tars.webdataset(f"{PREFIX}part-0.tar").open()) == 5


def test_a_prefix_is_listed_once_for_a_run(
    bucket: Bucket, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put_all(folder)
    listing = str(tmp_path / "listing.json")
    first = tars.webdataset(PREFIX, listing=listing)
    digest = first.open().digest
    first.record()
    bucket.put(folder / "part-0.tar", "set/part-9.tar")
    bucket.put(folder / "part-0.tar", "set/readme.txt")
    later = tars.webdataset(PREFIX, listing=listing)
    assert later.open().digest == digest
    assert f"{PREFIX} holds 1 more tars than when the run began; they are not used" in caplog.text
    assert len(tars.webdataset(PREFIX).open().shards) == 4
    bucket.delete("set/part-1.tar")
    with pytest.raises(ConfigError, match=r"1 of the 3 tars that the run began with are gone or changed \(part-1.tar"):
        later.open()
