"""What describes a cache: one manifest for all who fill it, and nothing that is damaged or of something else."""

from dataclasses import replace

import numpy as np
import pytest

from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.latent_cache.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    read_index,
    read_manifest,
    write_manifest,
)
from cascade_train.errors import ConfigError


def make_index(rows=5):
    table = np.zeros(rows, dtype=ROW_FIELDS)
    table["width"], table["height"] = 96, 64
    return Index(shards=("a.tar",), table=table, keys=np.array([f"sämple {row}".encode() for row in range(rows)]))


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
    return Manifest(**{**fields, **changes})


def test_units_cover_every_row_once():
    manifest = make_manifest()
    assert [row for unit in range(manifest.units) for row in manifest.rows_of(unit)] == list(range(5))


def test_what_is_written_is_read_back(tmp_path):
    folder, manifest = tmp_path / "new" / "cache", make_manifest()
    write_manifest(folder, manifest, make_index())
    assert read_manifest(folder) == manifest
    found = read_index(folder, manifest)
    assert found.digest == make_index().digest
    assert found.name(3) == "a.tar:sämple 3"
    assert {path.name for path in folder.iterdir()} == {MANIFEST, INDEX}


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


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be written"):
        write_manifest(tmp_path / "file", make_manifest(), make_index())


def test_no_cache_damaged_ones_and_other_formats_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no cache lies there, since there is no manifest.json"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, replace(make_manifest(), format=7), make_index())
    with pytest.raises(ConfigError, match="has format 7, this version reads 1"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(ConfigError, match=r"manifest.json is damaged .* Remove the cache and make it again"):
        read_manifest(tmp_path)


def test_a_damaged_or_foreign_index_is_refused(tmp_path):
    write_manifest(tmp_path, make_manifest(index="0"), make_index())
    with pytest.raises(ConfigError, match="is not the index of this cache"):
        read_index(tmp_path, make_manifest(index="0"))
    (tmp_path / INDEX).write_bytes(b"PK")
    with pytest.raises(ConfigError, match="index.npz is damaged"):
        read_index(tmp_path, make_manifest())
