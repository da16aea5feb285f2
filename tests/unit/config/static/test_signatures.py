import ast
import subprocess
import sys

import pytest

from cascade_train.config.static.signatures import (
    argument_doc,
    attribute_docs,
    class_constant,
    is_subclass,
    read_signature,
)
from cascade_train.config.static.static_source import UnreadableError, find
from tests.unit.config import members

HERE = "tests.unit.config.members"
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
def test_arguments_and_which_are_required_are_read_from_source(name: str):
    signature = read_signature(f"{HERE}.{name}")
    assert {key: parameter.required for key, parameter in signature.parameters.items()} == EXPECTED[name]
    assert not signature.accepts_any


def test_source_and_import_agree_on_our_own_components():
    import inspect

    for cls in (members.Plain, members.Child, members.Data, members.DataChild):
        imported = inspect.signature(cls).parameters
        read = read_signature(f"{HERE}.{cls.__name__}").parameters
        assert list(read) == list(imported)
        assert [p.required for p in read.values()] == [p.default is p.empty for p in imported.values()]


def test_keyword_dictionaries_accept_any_name():
    assert read_signature(f"{HERE}.Open").accepts_any


def test_torch_optimizer_is_read_through_its_re_export_without_torch():
    code = (
        "import sys; from cascade_train.config.static.signatures import read_signature as r;"
        "print(*r('torch.optim.AdamW').parameters); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0].startswith("params lr betas eps weight_decay")
    assert out[1] == "False"


@pytest.mark.parametrize("target", [f"{HERE}.CONSTANT", f"{HERE}.Orphan"])
def test_what_the_source_cannot_tell_is_said(target: str):
    with pytest.raises(UnreadableError):
        read_signature(target)


def test_class_constants_are_read_with_inheritance():
    assert class_constant(f"{HERE}.Child", "fits") == ("stage_b",)
    assert class_constant(f"{HERE}.Child", "name") == "plain"


def test_constant_without_value_is_unreadable():
    with pytest.raises(UnreadableError, match="has no literal 'absent'"):
        class_constant(f"{HERE}.Child", "absent")


def test_documents_of_arguments_come_from_class_or_constructor():
    assert argument_doc(f"{HERE}.Plain", "size") == "side in pixels; must be even."
    assert argument_doc(f"{HERE}.Plain", "name") == "of the thing."
    assert argument_doc(f"{HERE}.Made", "size") == "told by the constructor."
    assert argument_doc(f"{HERE}.Plain", "absent") == ""
    assert argument_doc("nowhere.Thing", "size") == ""


def test_attribute_docs_include_inherited_fields():
    assert attribute_docs(members.DataChild) == {"first": "The first.", "fourth": "The fourth, told in two lines."}


def test_subclasses_are_told_from_strangers():
    plain = find(f"{HERE}.Plain").node
    assert isinstance(plain, ast.ClassDef)
    assert is_subclass(find(f"{HERE}.Child"), plain)
    assert not is_subclass(find(f"{HERE}.Empty"), plain)
    assert is_subclass(find(f"{HERE}.Orphan"), plain)
