from pathlib import Path
from typing import Any

import pytest

from cascade_train.config.components import check_component, check_is_component, missing_message
from cascade_train.config.groups import group_form
from cascade_train.errors import ConfigError

HERE = "tests.unit.config.members"
ALLOWED = ["tests"]


def component(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **arguments}


@pytest.mark.parametrize(
    "node",
    [
        component("Plain", size=3),
        component("Plain", _partial_=True),
        component("Plain", size=3, _convert_="all", _recursive_=False),
        component("function", _args_=[3]),
        component("Data", first=1, second=[2]),
        component("Open", anything=component("Plain", size=3)),
        component("Orphan"),
        {"list": [component("Empty")], "value": 3},
    ],
)
def test_fitting_component_passes(node: Any):
    check_component("task", node, ALLOWED)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (component("Plain", sise=3), r"task.sise is unknown: .*Plain has no such argument. Did you mean task.size\?"),
        (component("Plain", sise=3, _partial_=True), "task.sise is unknown"),
        (component("Orphan", whatever=3), "task.whatever is unknown: .*Orphan has no such argument"),
        (
            component("Plain"),
            r"task.size is not set, and .*Plain needs it: side in pixels.* Set it: \+task",
        ),
        (component("Plain", size="x"), "task.size=x is of type str, but int is wanted there"),
        (component("Plain", size=None), "task.size=null is of type NoneType, but int is wanted there"),
        (
            component("annotated", _partial_=True, plain="p2"),
            r"task.plain=p2 is not a component \(Plain is wanted",
        ),
        (
            component("annotated", _partial_=True, plain=component("Empty")),
            "task.plain is a .*Empty, but Plain",
        ),
        (component("Open", x=[component("Plain", sise=3)]), r"task.x\[0\].sise is unknown"),
        ({"x": {"y": component("Plain", sise=3)}}, "task.x.y.sise is unknown"),
        ({"_target_": "os.system"}, r"names the package 'os'.*Allow it: 'run.allowed_packages=\[tests,os\]'"),
        ({"_target_": "tests"}, "must be the dotted path of a class"),
        ({"_target_": 3}, "task._target_=3 must be the dotted path of a class"),
    ],
)
def test_component_that_does_not_fit_is_refused_by_key(node: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        check_component("task", node, ALLOWED)


def test_text_in_place_of_a_root_component_names_the_groups_options():
    with pytest.raises(ConfigError, match=r"model=c_tinny is not a component.*model=c_tiny \(options: .*c_tiny"):
        check_is_component("model", "c_tinny")


def test_nested_group_form_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for option in ("inpaint", "canny"):
        (tmp_path / "filter").mkdir(exist_ok=True)
        (tmp_path / "filter" / f"{option}.yaml").write_text("_target_: x.Y")
    monkeypatch.setattr("cascade_train.config.groups.conf_dir", lambda: tmp_path)
    expected = "Choose it by its group: filter@task.filter=inpaint (options: canny, inpaint)."
    assert group_form("task.filter", "inpaint") == expected
    assert "filter@task.filter=inpaint" in group_form("task.filter", "inpant")
    assert missing_message("task.filter", {"task": {}}).startswith("task.filter is not chosen (???). Choose it")


def test_a_missing_value_is_named_with_what_to_type():
    assert missing_message("train.nothing", {}) == "train.nothing is not set (???). Set it: train.nothing=<value>."
