"""Units of a cache appear whole, are read by offset, and know when a byte of them has changed."""

import pickle
import zlib

import numpy as np
import pytest
import torch

from cascade_train.data.latent_cache.units import (
    SPAN,
    CachedSample,
    PayloadReader,
    caption_digest,
    captions_tar,
    is_whole,
    load_table,
    read_tensors,
    samples_tar,
    table_file,
    write_unit,
)
from cascade_train.errors import RunError
from tests.unit.data.latent_cache.test_manifest import make_manifest

CAPTIONS = {"": {"clip_text": torch.zeros(2, 3)}, "ein Käse, 赤い \ud800": {"clip_text": torch.ones(2, 3)}}


def make_sample(row):
    tensors = {"effnet_latent": torch.full((16, 2, 3), row / 3), "clip_img": torch.ones(1, 4, dtype=torch.bfloat16)}
    meta = {"caption": "ä\ud800", "key": str(row), "weight": 0.5, "values": {"n": np.int64(row), "a": np.arange(2)}}
    return CachedSample(tensors=tensors, meta=meta)


def write(folder, unit=1, rows=(2, 3), captions=CAPTIONS):
    manifest = make_manifest()
    write_unit(folder, unit, manifest, samples={row: make_sample(row) for row in rows}, captions=captions)
    return manifest


def test_samples_and_captions_are_read_back_by_offset(tmp_path):
    manifest = write(tmp_path)
    table = load_table(tmp_path, 1, manifest)
    reader = pickle.loads(pickle.dumps(PayloadReader()))
    tensors = read_tensors(reader.read(samples_tar(tmp_path, 1), table.samples[1, 0]))
    assert torch.equal(tensors["effnet_latent"], torch.full((16, 2, 3), 1.0))
    assert tensors["clip_img"].dtype == torch.bfloat16
    assert b'"values": {"a": [0, 1], "n": 3}' in reader.read(samples_tar(tmp_path, 1), table.samples[1, 1])
    place = table.digests.tolist().index(caption_digest("ein Käse, 赤い \ud800").encode())
    found = read_tensors(reader.read(captions_tar(tmp_path, 1), table.captions[place]))
    assert torch.equal(found["clip_text"], torch.ones(2, 3))
    assert {path.name for path in tmp_path.iterdir()} == {
        "samples-000001.tar",
        "captions-000001.tar",
        "unit-000001.npz",
    }


def test_rows_without_a_sample_and_units_without_any_are_kept_apart(tmp_path):
    manifest = write(tmp_path, rows=(3,))
    assert (load_table(tmp_path, 1, manifest).samples["bytes"] > 0).tolist() == [[False, False], [True, True]]
    write(tmp_path, unit=0, rows=(), captions={})
    assert is_whole(tmp_path, 0, manifest)
    assert len(load_table(tmp_path, 0, manifest).captions) == 0


def test_the_same_content_gives_the_same_tars(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    for path in (samples_tar, captions_tar):
        assert path(tmp_path / "a", 1).read_bytes() == path(tmp_path / "b", 1).read_bytes()


def test_a_unit_counts_as_missing_when_it_is_cut_damaged_or_of_another_cache(tmp_path):
    manifest = write(tmp_path)
    assert is_whole(tmp_path, 1, manifest)
    assert load_table(tmp_path, 1, make_manifest(filters="x")) is None
    tar = samples_tar(tmp_path, 1)
    content = tar.read_bytes()
    tar.write_bytes(content[:-512])
    assert load_table(tmp_path, 1, manifest) is None
    place = int(load_table_start(tmp_path))
    tar.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    assert load_table(tmp_path, 1, manifest) is not None
    assert not is_whole(tmp_path, 1, manifest)
    write(tmp_path)
    assert is_whole(tmp_path, 1, manifest)
    table_file(tmp_path, 1).write_bytes(b"PK")
    assert not is_whole(tmp_path, 1, manifest)


def load_table_start(folder):
    with np.load(table_file(folder, 1)) as parts:
        return parts["samples"][0, 0]["start"]


def test_a_changed_byte_is_told_with_its_place_and_the_remedy(tmp_path):
    span = load_table(tmp_path, 1, write(tmp_path)).samples[0, 0]
    tar = samples_tar(tmp_path, 1)
    content = bytearray(tar.read_bytes())
    content[span["start"] + 9] ^= 1
    tar.write_bytes(content)
    with pytest.raises(RunError, match=rf"samples-000001.tar is damaged at byte {span['start']}: run cascade-train"):
        PayloadReader().read(tar, span)


def test_files_stay_open_only_so_many_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(PayloadReader, "MOST_OPEN_FILES", 2)
    reader, span = PayloadReader(), np.array((0, 1, zlib.crc32(b"a")), dtype=SPAN)[()]
    for name in "abcab":
        (tmp_path / name).write_bytes(b"a")
        assert reader.read(tmp_path / name, span) == b"a"
    assert len(reader._descriptors) == 2


def test_nothing_is_left_of_a_unit_that_could_not_be_written(tmp_path):
    with pytest.raises(AttributeError):
        write_unit(tmp_path, 1, make_manifest(), samples={2: None}, captions={})
    assert list(tmp_path.iterdir()) == []
