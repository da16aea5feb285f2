"""`--help` explains the keys, the first ones first, and lists only options that can be chosen."""

import pytest

from cascade_train.config.error_messages import other_names
from cascade_train.config.groups import group_options, groups
from cascade_train.config.help import FIRST
from cascade_train.config.launch import compose_and_run
from tests.unit.config.composing import composed


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert compose_and_run(["--help"], lambda cfg: 1) == 0
    return capsys.readouterr().out.splitlines()


def test_help_begins_with_what_is_set_first(told: list[str]):
    assert told[2] == "== Set first =="
    assert [line.split()[0] for line in told[3:6]] == ["task=lora", "model=c_3b", "data.path=pictures"]


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
    typed = ("run.", "train.", "ema.", "parallel.", "log.", "checkpoint.", "sample.", "validate.", "rollback.")
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
    whole = composed("task=lora", "model=c_tiny", "data=folder")
    for name, ours in other_names().items():
        node = whole
        for part in ours.split(".") if " " not in ours else ():
            assert part in list(node.keys()), f"{name}: {ours}"
            node = node._get_node(part)
