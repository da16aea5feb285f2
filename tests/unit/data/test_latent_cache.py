"""A cache: one manifest for all who fill it; units appear whole, are read by offset, and notice a changed byte."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from cascade_train.data.cached import (
    MANIFEST,
    CachedSample,
    CacheManifest,
    caption_digest,
    is_whole,
    load_table,
    read_index,
    read_manifest,
    read_span,
    unit_file,
    write_manifest,
    write_unit,
)
from cascade_train.data.tar.storage import LocalFiles
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import tars

CAPTIONS = {"": {"clip_text": torch.zeros(2, 3)}, "ein Käse, 赤い \ud800": {"clip_text": torch.ones(2, 3)}}


def make_index(rows=5):
    return tars.index((f"sämple {row}" for row in range(rows)), width=96, height=64)


def test_what_a_split_goes_by_is_kept(tmp_path):
    index = replace(make_index(), split_by=np.array([b"a", b"a", b"b", b"c", b"c"]))
    write_manifest(tmp_path, make_manifest(), index)
    assert read_index(tmp_path, read_manifest(tmp_path)).split_by.tolist() == index.split_by.tolist()


def make_manifest(**changes):
    fields = {
        "rows": 5,
        "unit_samples": 2,
        "index": make_index().digest,
        "filters": "",
        "sizes": [[64, 96]],
        "tensors": {"effnet_latent": "float32 16x2x3"},
        "captions": {},
        "identity": {"data.crop": "center"},
        "made_with": {"torch": "2.13.0"},
    }
    return CacheManifest(**{**fields, **changes})


def test_the_same_cache_may_be_described_again_by_other_versions_of_the_libraries(tmp_path):
    write_manifest(tmp_path, make_manifest(), make_index())
    other = make_manifest(made_with={"torch": "2.11.0"})
    write_manifest(tmp_path, other, make_index())
    assert other.digest == make_manifest().digest
    assert read_manifest(tmp_path).made_with == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": {"data.crop": "saliency"}}, "data.crop is saliency here and center there"),
        ({"unit_samples": 3}, "unit_samples is 3 here and 2 there"),
        ({"index": "0"}, "holds another cache: index is 0 here"),
    ],
)
def test_a_folder_with_another_cache_is_refused(tmp_path, changes, message):
    write_manifest(tmp_path, make_manifest(), make_index())
    with pytest.raises(ConfigError, match=message):
        write_manifest(tmp_path, make_manifest(**changes), make_index())


def test_no_cache_damaged_ones_and_other_formats_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no cache found, there is no manifest.json"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, replace(make_manifest(), format=7), make_index())
    with pytest.raises(ConfigError, match="has format 7, this version reads 1"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(ConfigError, match=r"manifest.json is damaged .*; remove the cache and make it again"):
        read_manifest(tmp_path)


def make_sample(row):
    tensors = {"effnet_latent": torch.full((16, 2, 3), row / 3), "clip_img": torch.ones(1, 4, dtype=torch.bfloat16)}
    meta = {"caption": "ä\ud800", "key": str(row), "weight": 0.5, "values": {"n": np.int64(row), "a": np.arange(2)}}
    return CachedSample(tensors=tensors, meta=meta)


def write(folder, unit=1, rows=(2, 3), captions=CAPTIONS):
    manifest = make_manifest()
    samples, content = {row: make_sample(row) for row in rows}, np.array([5, 6], dtype=np.uint64)
    write_unit(folder, unit, manifest, samples=samples, captions=captions, content=content)
    return manifest


def test_samples_and_captions_are_read_back_by_offset(tmp_path):
    manifest = write(tmp_path)
    table = load_table(tmp_path, 1, manifest)
    files = pickle.loads(pickle.dumps(LocalFiles()))
    tensors = safetensors.torch.load(read_span(files, unit_file(tmp_path, "samples", 1), table.samples[1, 0]))
    assert torch.equal(tensors["effnet_latent"], torch.full((16, 2, 3), 1.0))
    assert tensors["clip_img"].dtype == torch.bfloat16
    assert b'"values": {"a": [0, 1], "n": 3}' in read_span(
        files, unit_file(tmp_path, "samples", 1), table.samples[1, 1]
    )
    place = table.digests.tolist().index(caption_digest("ein Käse, 赤い \ud800").encode())
    found = safetensors.torch.load(read_span(files, unit_file(tmp_path, "captions", 1), table.captions[place]))
    assert torch.equal(found["clip_text"], torch.ones(2, 3))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["captions-000001.tar", "samples-000001.tar", "unit-000001.npz"]


def test_a_unit_counts_as_missing_when_it_is_cut_damaged_or_of_another_cache(tmp_path):
    manifest = write(tmp_path)
    assert is_whole(tmp_path, 1, manifest)
    assert load_table(tmp_path, 1, make_manifest(filters="x")) is None
    place = int(load_table(tmp_path, 1, manifest).samples[0, 0]["start"])
    tar = unit_file(tmp_path, "samples", 1)
    content = tar.read_bytes()
    tar.write_bytes(content[:-512])
    assert load_table(tmp_path, 1, manifest) is None
    tar.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    assert load_table(tmp_path, 1, manifest) is not None
    assert not is_whole(tmp_path, 1, manifest)
    write(tmp_path)
    assert is_whole(tmp_path, 1, manifest)
    unit_file(tmp_path, "unit", 1).write_bytes(b"PK")
    assert not is_whole(tmp_path, 1, manifest)


def test_a_changed_byte_is_told_with_its_place_and_the_remedy(tmp_path):
    span = load_table(tmp_path, 1, write(tmp_path)).samples[0, 0]
    tar = unit_file(tmp_path, "samples", 1)
    content = bytearray(tar.read_bytes())
    content[span["start"] + 9] ^= 1
    tar.write_bytes(content)
    with pytest.raises(RunError, match=rf"samples-000001.tar is damaged at byte {span['start']}: run cascade-train"):
        read_span(LocalFiles(), tar, span)
