from typing import Any

import pytest

from cascade_train.config.static.annotations import fits, is_component, needs_component
from cascade_train.config.static.signatures import read_signature

HERE = "tests.unit.config.members"
PLAIN, CHILD, STRANGER = ({"_target_": f"{HERE}.{name}"} for name in ("Plain", "Child", "Empty"))

GOOD: list[tuple[str, Any]] = [
    ("integer", 3),
    ("number", 3),
    ("number", 0.5),
    ("number", {"_target_": f"{HERE}.function"}),
    ("flag", True),
    ("text", "x"),
    ("path", "/x"),
    ("maybe", None),
    ("maybe", 3),
    ("old", None),
    ("either", "x"),
    ("either", 3),
    ("many", [1, 2]),
    ("many", []),
    ("several", ["x", None]),
    ("pair", [1, 0.5]),
    ("run", [1, 2, 3]),
    ("table", {"a": 1}),
    ("word", "b"),
    ("word", 1),
    ("word", None),
    ("anything", {"x": [None]}),
    ("alias", [3]),
    ("quoted", 3),
    ("mode", "fast"),
    ("plain", PLAIN),
    ("plain", CHILD),
    ("plain", {**STRANGER, "_partial_": True}),
    ("plain", {"_target_": "elsewhere.Thing"}),
    ("plain", {"_target_": f"{HERE}.function"}),
    ("maybe_plain", None),
    ("plains", [PLAIN, CHILD]),
    ("speaks", STRANGER),
    ("call", PLAIN),
    ("bare", ["x", 1]),
    ("bare_call", PLAIN),
    ("unknown", "x"),
    ("untold", "x"),
]
BAD: list[tuple[str, Any]] = [
    ("integer", 0.5),
    ("integer", "3"),
    ("integer", True),
    ("integer", None),
    ("number", "0.5"),
    ("number", True),
    ("flag", 1),
    ("flag", "true"),
    ("text", 3),
    ("path", 3),
    ("maybe", "x"),
    ("old", "x"),
    ("either", 0.5),
    ("many", 3),
    ("many", "12"),
    ("many", [0.5]),
    ("several", [1]),
    ("pair", [1.0]),
    ("pair", [1.0, "x"]),
    ("run", ["x"]),
    ("table", {"a": "x"}),
    ("table", [1]),
    ("word", "c"),
    ("word", True),
    ("alias", ["x"]),
    ("quoted", "x"),
    ("plain", "inpaint"),
    ("plain", None),
    ("plain", {"size": 3}),
    ("plain", STRANGER),
    ("maybe_plain", "inpaint"),
    ("plains", [PLAIN, "x"]),
    ("plains", [STRANGER]),
    ("speaks", "x"),
    ("call", "torch.relu"),
    ("bare", "x"),
    ("bare_call", 3),
]


def parameter(name: str):
    return read_signature(f"{HERE}.annotated").parameters[name]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_value_fits_its_annotation(name: str, value: Any):
    assert fits(value, parameter(name).annotation, parameter(name).module)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_value_of_another_type_does_not_fit(name: str, value: Any):
    assert not fits(value, parameter(name).annotation, parameter(name).module)


@pytest.mark.parametrize("name", ["plain", "maybe_plain", "speaks", "call"])
def test_annotations_for_objects_need_a_component(name: str):
    assert needs_component(parameter(name).annotation, parameter(name).module)


@pytest.mark.parametrize("name", ["integer", "maybe", "text", "many", "anything", "mode", "untold"])
def test_annotations_for_values_need_none(name: str):
    assert not needs_component(parameter(name).annotation, parameter(name).module)


def test_a_component_is_a_node_with_a_target():
    assert is_component(PLAIN)
    assert not is_component({"size": 3})
    assert not is_component("x")
