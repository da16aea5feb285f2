"""`--help` explains the keys, the first ones first, and lists only options that can be chosen.

What it and errors say of a key comes from docstrings in source files, or from the comments of `conf/`.
"""

import inspect

import pytest
from hydra.utils import get_class

from cascade_train.config.error_messages import other_names
from cascade_train.config.groups import group_options, groups, option_targets
from cascade_train.config.help import FIRST, argument_doc, attribute_docs, key_comments
from cascade_train.config.launch import compose_and_run
from tests.unit.config import members
from tests.unit.config.composing import composed


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert compose_and_run(["--help"], lambda cfg: 1) == 0
    return capsys.readouterr().out.splitlines()


def test_help_begins_with_what_is_set_first(told: list[str]):
    assert told[2] == "== Set first =="
    assert [line.split()[0] for line in told[3:6]] == ["task=lora", "model=c_3b", "data.path=pictures"]
    assert """Quote values with braces, spaces or symbols: 'data.urls="a-{000..005}.tar"'.""" in told


def test_help_lists_every_option_and_no_file_that_others_include(told: list[str]):
    words = set(" ".join(told).replace(",", " ").split())
    options = [option for group in groups() for option in group_options(group)]
    assert len(options) > 60
    assert words >= set(options)
    assert "_base" not in words


def test_help_explains_every_typed_key_and_most_of_the_components(told: list[str]):
    keys = told[told.index("== Keys (key=value) of the options chosen ==") + 1 :]
    text = "\n".join(keys)
    assert "  train.max_grad_norm=1.0                 Global gradient norm above which" in text
    assert "  run.allow_any_target=false              Let a `_target_`" in text
    names = [n for n, line in enumerate(keys) if line.startswith("  ") and line[2] != " "]
    bare = [keys[n].strip() for n in names if len(keys[n].split("  ")) < 3 and not keys[n + 1].startswith(" " * 42)]
    typed = ("run.", "train.", "ema.", "parallel.", "log.", "checkpoint.", "sample.", "validate.")
    assert not [name for name in bare if name.startswith(typed)]
    assert len(names) > 150
    assert len(bare) < 0.1 * len(names), bare


@pytest.mark.parametrize("typed", FIRST)
def test_what_is_set_first_can_be_set(typed: str):
    key, _, value = typed.partition("=")
    if key in groups():
        assert value in group_options(key)
    else:
        data = "webdataset" if key == "data.urls" else "folder"
        composed("task=lora", "model=c_tiny", f"data={data}", typed.replace("'", ""))


def test_names_of_other_trainers_lead_to_keys_that_are_there():
    wholes = [composed("task=lora", f"model={model}", "data=folder") for model in ("c_tiny", "sd_tiny")]
    for name, ours in other_names().items():
        nodes = wholes
        for part in ours.split(".") if " " not in ours else ():
            nodes = [node._get_node(part) for node in nodes if part in list(node.keys())]
            assert nodes, f"{name}: {ours}"


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


NODES = {"Regularised.source", "Regularised.regularisation", "NetworkFilter.network"}
INHERITED = {"ClassTars.listing", "ClassTars.buffer_samples"}
"""Options that are nodes of their own, and those that no file of the group names."""


@pytest.mark.parametrize("group", ["data", "filter"])
def test_every_option_of_sources_and_filters_is_explained_in_conf(group: str) -> None:
    targets = set(option_targets(group).values()) - {"???"}
    assert len(targets) >= 9
    keys = {(target, name) for target in targets for name in inspect.signature(get_class(target)).parameters}
    unexplained = {f"{target.rpartition('.')[2]}.{name}" for target, name in keys - key_comments().keys()}
    assert unexplained <= NODES | INHERITED
