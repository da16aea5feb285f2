"""Which arguments a constructor takes, what values fit them, and what they mean to resumes and saved configurations."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cascade_train.config.arguments import (
    component_options,
    declared_roles,
    fits,
    free_keys,
    make_absolute,
    needs_component,
    parameters,
)
from cascade_train.config.saved import to_plain
from cascade_train.config.targets import import_target
from tests.unit.config import members
from tests.unit.config.composing import composed

HERE = "tests.unit.config.members"
PLAIN, CHILD, STRANGER = ({"_target_": f"{HERE}.{name}"} for name in ("Plain", "Child", "Empty"))

PARTIAL, FUNCTION, ELSEWHERE = {**STRANGER, "_partial_": True}, {"_target_": f"{HERE}.function"}, {"_target_": "no.T"}

FITTING: dict[str, tuple[list[Any], list[Any]]] = {
    "integer": ([3], [0.5, "3", True, None]),
    "number": ([3, 0.5, FUNCTION], ["0.5", True, PLAIN]),
    "flag": ([True], [1, "true"]),
    "text": (["x"], [3]),
    "path": (["/x"], [3]),
    "maybe": ([None, 3], ["x"]),
    "old": ([None], ["x"]),
    "either": (["x", 3], [0.5]),
    "many": ([[1, 2], [], PLAIN], [3, "12", [0.5]]),
    "several": ([["x", None]], [[1]]),
    "pair": ([[1, 0.5]], [[1.0], [1.0, "x"]]),
    "run": ([[1, 2, 3]], [["x"]]),
    "table": ([{"a": 1}], [{"a": "x"}, [1]]),
    "word": (["b", 1, None], ["c", True]),
    "anything": ([{"x": [None]}], []),
    "alias": ([[3]], [["x"]]),
    "quoted": ([3], ["x"]),
    "mode": (["fast"], []),
    "plain": ([PLAIN, CHILD, PARTIAL, ELSEWHERE, FUNCTION], ["inpaint", None, {"size": 3}, STRANGER]),
    "maybe_plain": ([None], ["inpaint"]),
    "plains": ([[PLAIN, CHILD]], [[PLAIN, "x"], [STRANGER]]),
    "speaks": ([STRANGER], ["x"]),
    "call": ([PLAIN], ["torch.relu"]),
    "bare": ([["x", 1]], ["x", {"a": 1}]),
    "bare_call": ([PLAIN], [3]),
    "unknown": (["x"], []),
    "untold": (["x"], []),
}
"""Argument of `members.annotated` -> values that fit its type, and values that do not."""


def hint(name: str):
    return parameters(members.annotated)[0][name].hint


@pytest.mark.parametrize("name", FITTING)
def test_a_value_fits_its_annotation_or_does_not(name: str):
    good, bad = FITTING[name]
    assert [value for value in good if not fits(value, hint(name))] == []
    assert [value for value in bad if fits(value, hint(name))] == []


@pytest.mark.parametrize("name", ["plain", "maybe_plain", "speaks", "call"])
def test_annotations_for_objects_need_a_component(name: str):
    assert needs_component(hint(name))


@pytest.mark.parametrize("name", ["integer", "maybe", "text", "many", "anything", "mode", "untold"])
def test_annotations_for_values_need_none(name: str):
    assert not needs_component(hint(name))


EXPECTED = {
    "Plain": {"size": True, "name": False},
    "Child": {"size": True, "name": False},
    "Data": {"first": True, "second": False, "third": False},
    "DataChild": {"first": True, "second": False, "third": False, "fourth": True, "fifth": False},
    "Empty": {},
    "Made": {"size": True},
    "function": {"size": True},
    "Plain.build": {"size": True},
    "Plain.pure": {"size": True},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_arguments_and_which_are_required_are_known(name: str):
    known, takes_any = parameters(import_target(f"{HERE}.{name}"))
    assert {key: parameter.required for key, parameter in known.items()} == EXPECTED[name]
    assert not takes_any


def test_keyword_dictionaries_accept_any_name():
    assert parameters(members.Open)[1]


def test_a_type_is_evaluated_where_it_is_written():
    assert parameters(members.DataChild)[0]["second"].hint == list[int]


OWN = """
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
if TYPE_CHECKING:
    from collections.abc import Iterable
    from elsewhere import Foo
    from cascade_train.options import File, Free

class Mine:
    def __init__(self, *, patience: Free[float], weights: Free[File[Foo | None]], device: torch.device): ...
"""


def test_roles_hold_where_names_are_for_type_checkers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_roles.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert declared_roles({"_target_": "own_roles.Mine"}) == {
        **{"patience": {"Free"}, "weights": {"Free", "File"}, "device": set()}
    }
    assert fits("cpu", parameters(import_target("own_roles.Mine"))[0]["device"].hint)


WAITS = ("num_workers", "worker_start", "max_wait_seconds", "max_unreadable_share", "num_examples_to_see", "on_change")
FREE_OF_EVERY_SOURCE = {f"data.{name}" for name in WAITS}


def test_a_source_says_which_of_its_options_a_continued_run_may_change() -> None:
    shapes = free_keys(to_plain(composed("model=c_tiny", "task=finetune")))
    assert shapes == FREE_OF_EVERY_SOURCE | {"model.kernels"}
    tars = free_keys(to_plain(composed("model=c_tiny", "task=finetune", "data=webdataset", "data.urls=a.tar")))
    stream = {"data.stream.timeout_seconds", "data.stream.max_file_mib"}
    assert tars == FREE_OF_EVERY_SOURCE | stream | {"data.index_dir", "data.listing", "model.kernels"}


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
    (tmp_path / "a.pth").touch()
    cfg = OmegaConf.create(
        {
            "model": {"_target_": "cascade_train.models.cascade.stage_c.StageC", "weights": "a.pth", "seed": 3},
            "task": {
                "filter": {
                    "_target_": "cascade_train.filters.identity.IdentityFilter",
                    "detector": "gone.onnx",
                    "recogniser": "a.pth",
                    "name": "a.pth",
                }
            },
            "data": {"_target_": "cascade_train.data.webdataset.WebDataset", "urls": ["a.pth", "s3://bucket/b.tar"]},
            "ema": {"weights": "a.pth"},
            "validate": {"lpips": "a.pth", "rfid": None},
        }
    )
    make_absolute(cfg)
    whole = str(tmp_path / "a.pth")
    assert cfg.model.weights == cfg.ema.weights == cfg.validate.lpips == cfg.task.filter.recogniser == whole
    assert (cfg.task.filter.detector, cfg.task.filter.name) == ("gone.onnx", "a.pth")
    assert cfg.data.urls == [whole, "s3://bucket/b.tar"]
