"""What `--help` and errors say of a key comes from docstrings in source files, or from the comments of `conf/`."""

import inspect
import subprocess
import sys

import pytest
from hydra.utils import get_class

from cascade_train.config.groups import option_targets
from cascade_train.config.help import argument_doc, attribute_docs, key_comments
from tests.unit.config import members

HERE = "tests.unit.config.members"


def test_documents_of_arguments_come_from_class_or_constructor():
    assert argument_doc(f"{HERE}.Plain", "size") == "side in pixels; must be even."
    assert argument_doc(f"{HERE}.Plain", "name") == "of the thing."
    assert argument_doc(f"{HERE}.Made", "size") == "told by the constructor."
    assert argument_doc(f"{HERE}.Plain", "absent") == ""
    assert argument_doc("nowhere.Thing", "size") == ""


def test_a_class_named_after_its_base_and_a_broken_file_have_no_documents(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "same_name.py").write_text(f"from {HERE} import Plain\nclass Plain(Plain): ...\n")
    (tmp_path / "unreadable.py").write_text("class A\n")
    assert argument_doc("same_name.Plain", "size") == argument_doc("unreadable.A", "size") == ""


def test_attribute_docs_include_inherited_fields():
    assert attribute_docs(members.DataChild) == {"first": "The first.", "fourth": "The fourth, told in two lines."}


def test_documents_of_a_component_are_read_without_torch():
    code = (
        "import sys; from cascade_train.config.help import argument_doc as d;"
        "print(d('cascade_train.data.webdataset.WebDataset', 'crop')); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0]
    assert out[1] == "False"


NODES = {"Regularised.source", "Regularised.regularisation", "NetworkFilter.network"}
INHERITED = {"ClassTars.listing", "ClassTars.streams", "ClassTars.stream"}
"""Options that are nodes of their own, and those that no file of the group names."""


@pytest.mark.parametrize("group", ["data", "filter"])
def test_every_option_of_sources_and_filters_is_explained_in_conf(group: str) -> None:
    targets = set(option_targets(group).values()) - {"???"}
    assert len(targets) >= 9
    keys = {(target, name) for target in targets for name in inspect.signature(get_class(target)).parameters}
    unexplained = {f"{target.rpartition('.')[2]}.{name}" for target, name in keys - key_comments().keys()}
    assert unexplained <= NODES | INHERITED
