"""Which arguments a constructor takes, what values fit them, and what they mean to resumes and saved configurations."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

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

OWN_TYPES = {name: parameter.hint for name, parameter in parameters(members.annotated)[0].items()}

FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [3], [0.5, "3", True, None]),
    (float, [3, 0.5, FUNCTION], ["0.5", True, PLAIN]),
    (bool, [True], [1, "true"]),
    (str, ["x"], [3]),
    (Path, ["/x"], [3]),
    (int | None, [None, 3], ["x"]),
    (Union[int, str], ["x", 3], [0.5]),  # noqa: UP007
    (list[int], [[1, 2], [], PLAIN], [3, "12", [0.5]]),
    (Sequence[str | None], [["x", None]], [[1]]),
    (tuple[float, float], [[1, 0.5]], [[1.0], [1.0, "x"]]),
    (tuple[int, ...], [[1, 2, 3]], [["x"]]),
    (Mapping[str, int], [{"a": 1}], [{"a": "x"}, [1]]),
    (Literal["a", "b", 1, None], ["b", 1, None], ["c", True]),
    (Any, [{"x": [None]}], []),
    (members.Mode, ["fast"], []),
    (members.Plain, [PLAIN, CHILD, PARTIAL, ELSEWHERE, FUNCTION], ["inpaint", None, {"size": 3}, STRANGER]),
    (members.Plain | None, [None], ["inpaint"]),
    (list[members.Plain], [[PLAIN, CHILD]], [[PLAIN, "x"], [STRANGER]]),
    (members.Speaks, [STRANGER], ["x"]),
    (Callable[..., int], [PLAIN], ["torch.relu"]),
    (list, [["x", 1]], ["x", {"a": 1}]),
    (Callable, [PLAIN], [3]),
    (OWN_TYPES["alias"], [[3]], [["x"]]),
    (OWN_TYPES["quoted"], [3], ["x"]),
    (OWN_TYPES["unknown"], ["x"], []),
    (OWN_TYPES["untold"], ["x"], []),
]
"""Types, each with values that fit it, and values that do not."""


@pytest.mark.parametrize(("hint", "good", "bad"), FITTING)
def test_a_value_fits_its_annotation_or_does_not(hint: Any, good: list[Any], bad: list[Any]):
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_annotations_for_objects_need_a_component_and_those_for_values_none():
    assert all(map(needs_component, (members.Plain, members.Plain | None, members.Speaks, Callable[..., int])))
    assert not any(map(needs_component, (int, int | None, str, list[int], Any, members.Mode, OWN_TYPES["untold"])))


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


def test_keyword_dictionaries_accept_any_name_and_a_type_is_evaluated_where_it_is_written():
    assert parameters(members.Open)[1]
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


WAITS = (
    "num_workers",
    "worker_start",
    "max_wait_seconds",
    "max_unreadable_share",
    "num_examples_to_see",
    "on_change",
    "exclude",
)
FREE_OF_EVERY_SOURCE = {f"data.{name}" for name in WAITS}


def test_a_source_says_which_of_its_options_a_continued_run_may_change() -> None:
    shapes = free_keys(to_plain(composed("model=c_tiny", "task=finetune")))
    assert shapes == FREE_OF_EVERY_SOURCE | {"model.kernels"}
    tars = free_keys(to_plain(composed("model=c_tiny", "task=finetune", "data=webdataset", "data.urls=a.tar")))
    assert tars == FREE_OF_EVERY_SOURCE | {"data.index_dir", "data.listing", "model.kernels"}


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
