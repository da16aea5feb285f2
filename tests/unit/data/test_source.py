"""Options of every source, and the YAML files of `conf/data`, which build their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from cascade_train.assembly.build import build_node
from cascade_train.data.classification import ClassFolders, ClassTars
from cascade_train.data.folder import Folder
from cascade_train.data.mixture import Mixture
from cascade_train.data.parquet import Parquet
from cascade_train.data.shapes import Shapes
from cascade_train.data.source import Source
from cascade_train.data.table import Table
from cascade_train.data.webdataset import WebDataset


def build(repository: Path, *overrides: str) -> Source:
    with initialize_config_dir(str(repository / "conf"), version_base="1.3"):
        cfg = compose(overrides=["+model={image_size: 48}", "+run={dir: here}", *overrides])
    return build_node(cfg.data)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["+data=shapes", "data.samples=12"], Shapes),
        (["+data=webdataset", 'data.urls=["a/{000..005}.tar"]'], WebDataset),
        (["+data=webdataset", 'data.urls="file:a.tar"', "data.crop=random"], WebDataset),
        (["+data=folder", "data.path=pictures"], Folder),
        (["+data=csv", "data.path=pictures.csv"], Table),
        (["+data=classification", "data.urls=a.tar"], ClassTars),
        (["+data=class_folders", "data.path=a", "data.idx_to_prompt=b.json"], ClassFolders),
        (["+data=parquet", "data.path=[a.parquet,b]"], Parquet),
        (
            ["+data=mixture", "+data@data.sources.a=shapes", "+data@data.sources.b=folder", "data.sources.b.path=x"],
            Mixture,
        ),
    ],
)
def test_every_source_is_built_from_its_file(repository: Path, overrides: list[str], kind: type[Source]) -> None:
    source = build(repository, *overrides)
    assert type(source) is kind
    assert source.image_size == 48
