from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.captions import Captions
from cascade_train.data.stream import read_tar
from cascade_train.data.tar.members import Dropped
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract, contents, loading


class TestWebDataset(DatasetContract):
    order_digest = "ca8bce708777fa19"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> WebDataset:
        if not any(folder.glob("*.tar")):
            for shard, keys in enumerate([range(12), range(12, 20), range(20, 37)]):
                tars.write(folder / f"part-{shard}.tar", tars.samples(keys))
        return tars.webdataset(folder / "part-{0..2}.tar", **options)

    @pytest.mark.slow
    def test_spawned_workers_give_the_same_batches(self, folder: Path, uninterrupted: list[str]) -> None:
        source = self.make_source(folder, crop="random", num_workers=1, worker_start="spawn")
        assert contents(source, 2) == uninterrupted[:2]


def test_pictures_captions_and_names_come_from_the_tar(tmp_path: Path) -> None:
    source = tars.webdataset(tars.write(tmp_path / "a.tar", tars.samples([7])))
    index = source.open()
    sample = source.read(0)
    assert (sample.image, sample.caption, sample.key) == (tars.picture(tint=7), "picture 7", "a.tar:0007")
    assert (index.table["width"][0], index.table["height"][0]) == (40, 32)


def test_samples_without_a_part_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [*tars.samples(range(3)), ("0003.png", tars.picture()), ("0004.txt", b"alone"), ("0005.gif", b"x")]
    source = tars.webdataset(tars.write(tmp_path / "a.tar", files))
    with caplog.at_level(logging.WARNING):
        assert len(source.open()) == 3
        source.open()
    assert caplog.text.count("1 keys with a picture but no caption (.txt), 2 keys without a picture") == 2
    assert "0003 (png); 0004 (txt); 0005 (gif)" in caplog.text


def test_a_file_cut_after_indexing_is_named(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    source = tars.webdataset(path)
    source.open()
    os.truncate(path, 100)
    with pytest.raises(OSError, match="it changed during the run"):
        source.read(2)


def test_names_that_are_no_utf8_train_as_they_do_in_a_stream(tmp_path: Path) -> None:
    files = tars.samples(range(3))
    odd = [
        (os.fsdecode(b"caf\xe9 \xff" + end), content) for end, content in ((b".png", tars.picture()), (b".txt", b"a"))
    ]
    path = tars.write(tmp_path / "a.tar", [*files, *odd])
    source = tars.webdataset(path)
    index = source.open()
    assert index.keys.tolist()[-1] == b"caf\xe9 \xff"
    assert (index.name(3), source.read(3).key) == ("a.tar:caf\\udce9 \\udcff",) * 2
    streamed = dict(read_tar(tars.found(path), max_file_bytes=9999, dropped=Dropped()))
    assert [key.encode(errors="surrogateescape") for key in streamed] == index.keys.tolist()
    with loading(tars.webdataset(path), global_batch_size=4) as loader:
        assert "a.tar:caf\\udce9 \\udcff" in {key for batch in next(loader) for key in batch.keys}


JSON_ALONE = [("0.png", tars.picture()), ("0.json", b'{"caption": "a cat"}'), ("1.png", tars.picture())]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_samples_of_picture_and_json_train_by_a_key_of_the_json(tmp_path: Path, name: str) -> None:
    path = tars.write(tmp_path / name, JSON_ALONE, "w:gz" if name.endswith("gz") else "w")
    with loading(
        tars.webdataset(path, captions=Captions(key="caption")), global_batch_size=1, micro_batch_size=1
    ) as feed:
        assert [next(feed)[0].captions for _ in range(2)] == [("a cat",), ("a cat",)]


def test_the_key_of_captions_changes_which_samples_of_one_index_train(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", [*JSON_ALONE, ("2.png", tars.picture()), ("2.txt", b"a dog")])
    with pytest.raises(ConfigError, match=r"data\.captions\.key=") as refused:
        tars.webdataset(tars.write(tmp_path / "b.tar", JSON_ALONE)).open()
    assert ".txt" in str(refused.value)
    assert tars.webdataset(path).open().keys.tolist() == [b"2"]
    assert tars.webdataset(path, captions=Captions(key="caption")).open().keys.tolist() == [b"0"]


def test_files_of_a_sample_may_compose_accents_in_different_ways(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    files = [
        (f"{decomposed}.png", tars.picture()),
        (f"{composed}.txt", b"a cup"),
        (f"{composed}.mask.png", tars.mask()),
    ]
    source = tars.webdataset(tars.write(tmp_path / "a.tar", files))
    assert source.open().keys.tolist() == [composed.encode()]
    assert (source.read(0).caption, source.read(0).mask) == ("a cup", tars.mask())
