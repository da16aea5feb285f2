"""What options mean to resumes and saved configurations is declared where they are defined."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.saved import to_plain
from cascade_train.config.static.roles import component_options, declared_roles, free_keys, make_absolute
from tests.unit.config.composing import composed

FREE_OF_EVERY_SOURCE = {
    f"data.{name}"
    for name in (
        "num_workers",
        "worker_start",
        "max_wait_seconds",
        "max_unreadable_share",
        "num_examples_to_see",
        "on_change",
    )
}


def test_a_source_says_which_of_its_options_a_continued_run_may_change() -> None:
    shapes = free_keys(to_plain(composed("model=c_tiny", "task=finetune")))
    assert shapes == FREE_OF_EVERY_SOURCE
    tars = free_keys(to_plain(composed("model=c_tiny", "task=finetune", "data=webdataset", "data.urls=a.tar")))
    stream = {"data.stream.timeout_seconds", "data.stream.max_file_mib"}
    assert tars == FREE_OF_EVERY_SOURCE | stream | {"data.index_dir", "data.listing"}


def test_the_parts_of_a_mixture_say_it_too() -> None:
    mixed = ("data=mixture", "+data@data.sources.mine=folder", "data.sources.mine.path=pictures")
    found = free_keys(to_plain(composed("model=c_tiny", "task=finetune", *mixed)))
    assert {"data.num_workers", "data.sources.mine.max_unreadable_share", "data.sources.mine.index_dir"} <= found
    assert not {"data.sources.mine.path", "data.crop", "data.shares"} & found


def test_roles_nest_and_hold_for_what_lies_below() -> None:
    node = {
        "_target_": "cascade_train.data.folder.Folder",
        "path": "x",
        "row_filters": {"score": "> 4"},
        "crop": "center",
    }
    roles = {option.key: set(option.roles) for option in component_options(node, "data.")}
    assert roles == {
        "data._target_": set(),
        "data.path": {"Order", "File"},
        "data.row_filters.score": {"Order"},
        "data.crop": set(),
    }
    assert declared_roles({"_target_": "nowhere.Thing"}) == declared_roles({"path": "x"}) == {}


def test_existing_paths_of_every_component_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("edges.pth", "vgg.pth", "a.tar"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    cfg = OmegaConf.create(
        {
            "model": {
                "_target_": "cascade_train.models.stage_c.StageC",
                "weights": "models",
                "seed": 3,
                "previewer": {
                    "_target_": "cascade_train.models.previewer.ConvolutionPreviewer",
                    "weights": "stabilityai/stable-cascade:previewer.safetensors",
                },
                "semantic_compressor": None,
            },
            "task": {
                "filter": {
                    "_target_": "cascade_train.filters.identity.IdentityFilter",
                    "detector": "gone.onnx",
                    "recogniser": "edges.pth",
                    "name": "edges.pth",
                }
            },
            "objective": {"perceptual": {"_target_": "cascade_train.tasks.vqgan.Perceptual", "weights": "vgg.pth"}},
            "data": {
                "_target_": "cascade_train.data.webdataset.WebDataset",
                "urls": ["a.tar", "s3://bucket/b.tar"],
            },
            "ema": {"weights": "models"},
            "validate": {"lpips": "vgg.pth", "rfid": None},
        }
    )
    make_absolute(cfg)
    assert cfg.model.weights == cfg.ema.weights == str(tmp_path / "models")
    assert cfg.model.previewer.weights == "stabilityai/stable-cascade:previewer.safetensors"
    assert cfg.task.filter.recogniser == str(tmp_path / "edges.pth")
    assert (cfg.task.filter.detector, cfg.task.filter.name) == ("gone.onnx", "edges.pth")
    assert cfg.objective.perceptual.weights == cfg.validate.lpips == str(tmp_path / "vgg.pth")
    assert cfg.data.urls == [str(tmp_path / "a.tar"), "s3://bucket/b.tar"]
