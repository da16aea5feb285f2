from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from cascade_train.data.tar import storage
from cascade_train.data.tar.storage import S3, StoredObject
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import contents
from tests.unit.data.loopback import FaultyS3, faulty_s3, point_at

pytestmark = pytest.mark.s3

CONTENT = random.Random(0).randbytes(100_000)
ITEM = StoredObject(url="s3://bucket/folder/a.tar", size=len(CONTENT), version='"first"')


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    monkeypatch.setattr(storage, "ATTEMPTS", 4)  # boto3 waits between them
    with faulty_s3(CONTENT) as running:
        point_at(monkeypatch, running.endpoint)
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between attempts, not waited for."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_a_range_is_read_with_one_request(server: FaultyS3) -> None:
    reader = S3()
    assert reader.stat(ITEM.url) == ITEM
    assert reader.read(ITEM, 1000, 500) == CONTENT[1000:1500]
    assert reader.read(ITEM, 99_999, 1) == CONTENT[-1:]
    assert reader.read(ITEM, 10, 0) == b""
    assert server.ranges == [(1000, 1499), (99_999, 99_999)]


@pytest.mark.parametrize("fault", ["cut", "busy", "stall"])
def test_what_may_pass_is_tried_again(
    server: FaultyS3, waits: list[float], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_READ_SECONDS", 2.0)
    server.faults = [fault] * 3 if fault != "stall" else [fault]
    assert S3().read(ITEM, 0, len(CONTENT)) == CONTENT
    assert len(server.ranges) == (4 if fault != "stall" else 2)


def test_a_server_that_stays_busy_ends_the_run(server: FaultyS3, waits: list[float]) -> None:
    server.faults = ["busy"] * 20
    with pytest.raises(RunError, match="reading s3://bucket/folder/a.tar failed 4 times: the server answered 503 Slow"):
        S3().read(ITEM, 0, 10)
    assert len(server.ranges) == 4


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("whole", RunError, "answered 200 with no range where bytes 5-14/100000 was .* does not support ranged reads"),
        ("changed", RunError, 'changed during the run: its ETag was "first" and is "another"'),
        ("forbidden", ConfigError, r"may not be read \(403 AccessDenied\); check the credentials"),
        ("teapot", RunError, "a.tar failed 1 times: the server answered 418 Teapot"),
    ],
)
def test_what_does_not_pass_is_refused_at_once(
    server: FaultyS3, fault: str, error: type[Exception], message: str
) -> None:
    server.faults = [fault]
    with pytest.raises(error, match=message):
        S3().read(ITEM, 5, 10)
    assert len(server.ranges) == 1


def test_a_client_does_not_cross_a_fork(server: FaultyS3) -> None:
    reader = S3()
    assert reader.read(ITEM, 0, 10) == CONTENT[:10]
    before = reader._client()
    ends = []
    for number in range(2):
        end, child_end = os.pipe()
        if os.fork() == 0:
            part = reader.read(ITEM, number, 1000)
            os.write(child_end, bytes([part == CONTENT[number : number + 1000], reader._client() is not before]))
            os._exit(0)
        ends.append(end)
    assert reader.read(ITEM, 50, 1000) == CONTENT[50:1050]
    assert [os.read(end, 2) for end in ends] == [b"\x01\x01"] * 2
    for _ in ends:
        os.wait()
    assert reader._client() is before


def test_no_credentials_are_told(
    server: FaultyS3, waits: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = ["busy", "forbidden"]
    with caplog.at_level(logging.DEBUG, "cascade_train"), pytest.raises(ConfigError) as caught:
        S3().read(ITEM, 0, 10)
    for told in (caplog.text, str(caught.value), repr(S3())):
        assert "never-shown" not in told
        assert "of-the-tests" not in told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_that_fsspec_reads_gives_the_batches_of_a_disk_in_forked_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(12)))
    expected = contents(tars.webdataset(path), 4)
    monkeypatch.setattr("cascade_train.data.tar.files.SCHEMES", ("memory",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    fsspec.filesystem("memory").pipe_file("/bucket/a.tar", path.read_bytes())
    source = tars.webdataset("memory://bucket/a.tar", num_workers=num_workers)
    assert contents(source, 4) == expected
    made = source._stores[0]._client()  # type: ignore[attr-defined]
    if (child := os.fork()) == 0:
        os._exit(int(source._stores[0]._client() is made))  # type: ignore[attr-defined]
    assert os.waitpid(child, 0)[1] == 0, "a client crosses no fork"
    with pytest.raises(ConfigError, match="data.urls: memory://bucket/b.tar is not there"):
        tars.webdataset("memory://bucket/b.tar").open()
