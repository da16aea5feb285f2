import re
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import MISSING

from cascade_train.__main__ import is_training, launch
from cascade_train.commands.parts.command_line import help_text, parse
from cascade_train.config.groups import commands
from cascade_train.errors import ConfigError


class Format(StrEnum):
    png = "png"
    webp = "webp"


@dataclass(kw_only=True)
class Draw:
    """Draw images from a run."""

    source: str = MISSING
    """Folder of a run or an export."""
    prompts: list[str] = field(default_factory=list)
    """What to draw."""
    steps: int = 20
    """Network evaluations."""
    out: str | None = None
    """Folder for the images; null = the run's own."""
    format: Format = Format.png
    """Of the files."""


def test_keys_fill_the_fields_with_their_types():
    draw = parse(Draw, ["from=runs/a", "prompts=[a red circle, 'b, c']", "steps=5", "format=webp", "out=null"])
    assert draw == Draw(source="runs/a", prompts=["a red circle", "b, c"], steps=5, format=Format.webp)


@dataclass(kw_only=True)
class Guided:
    """Draw with guidance."""

    guidance_scale: float = 4.0
    """Of the prompt."""


def test_a_text_in_place_of_a_number_is_refused():
    assert parse(Guided, ["guidance_scale=3"]) == Guided(guidance_scale=3.0)
    with pytest.raises(ConfigError, match=r"^guidance_scale=high must be a number\.$"):
        parse(Guided, ["guidance_scale=high"])


def test_braces_in_a_value_are_kept():
    assert parse(Draw, ["from=a-{000..005}.tar"]).source == "a-{000..005}.tar"


REFUSED = {
    "promts=[a]": r"promts is unknown\. Did you mean prompts\?",
    "source=a": "source is unknown. Known here: from, prompts",
    "prompts": "'prompts' is not an argument. Write key=value",
    "--steps=3": "'--steps=3' is not an argument. Write key=value",
    "steps=many": "steps=many must be a whole number, e.g. steps=1000",
    "steps=0.5": r"steps=0\.5 must be a whole number, e\.g\. steps=1\.",
    "prompts=None": "prompts=None is the text None. Where a key takes none, write prompts=null",
    "steps=step_9": "steps=step_9 must be a whole number, e.g. steps=9",
    "tests": "'tests' is not an argument. Write from=tests;",
    "format=gif": "'format=gif' cannot be read: Invalid value 'gif', expected one of",
    "out={a": "'out={a' cannot be read: while parsing a flow mapping",
    "steps=3": "from is not set: Folder of a run or an export. Set it: from=<value>",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_does_not_fit_is_refused_by_key(argument: str):
    with pytest.raises(ConfigError, match=REFUSED[argument]):
        parse(Draw, [argument])


@pytest.mark.parametrize("text", ['["a", "b"]', 'a: "b" \\n', "{a: b}"])
def test_the_remedy_for_a_text_with_symbols_can_be_typed_as_it_is_shown(text: str):
    with pytest.raises(ConfigError, match="A text with symbols is written") as refused:
        parse(Draw, ["from=a", f"out={text}"])
    typed = shlex.split(str(refused.value).partition("is written ")[2].removesuffix("."))
    assert parse(Draw, ["from=a", *typed]).out == text


def test_help_lists_every_field():
    lines = help_text(Draw).splitlines()
    assert lines[0] == "Draw images from a run."
    assert lines[3:] == [
        "  from=???  Folder of a run or an export.",
        "  prompts=[]  What to draw.",
        "  steps=20  Network evaluations.",
        "  out=null  Folder for the images; null = the run's own.",
        "  format=png  Of the files.",
    ]


SWEPT = ["lr=0.0001,rank=4", "lr=0.001,rank=4", "my run #2"]


def test_path_of_a_run_is_taken_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in SWEPT:
        (tmp_path / "sweep" / name).mkdir(parents=True)
        assert parse(Draw, [f"from=sweep/{name}"]).source == f"sweep/{name}"
        monkeypatch.chdir(tmp_path / "sweep")
        assert parse(Draw, [f"from={name}"]).source == name
        monkeypatch.chdir(tmp_path)
    given = ["sweep/lr=0.0001,rank=4", "missing", "sweep/lr=0.001,rank=4"]
    assert parse(Draw, ["from=a", f"prompts=[{','.join(given)}]"]).prompts == given


def test_a_file_named_like_a_number_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5").mkdir()
    assert parse(Draw, ["from=a", "steps=5"]).steps == 5


def test_every_command_is_listed_and_declared(capsys: pytest.CaptureFixture[str]):
    assert len(commands()) >= 14
    assert launch(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, meaning in commands().items():
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", listed, re.MULTILINE)
        assert launch([name, "--help"]) == 0
        assert (
            f"cascade-train {name if name != 'train' else 'group=option'} " in capsys.readouterr().out.splitlines()[0]
        )


def test_the_word_train_may_stand_before_the_overrides(capsys: pytest.CaptureFixture[str]):
    shown = []
    for words in ([], ["train"]):
        assert launch([*words, "task=lora", "model=c_tiny", "--cfg", "job", "--package", "lr_scheduler"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


def test_version_is_that_of_the_library(capsys: pytest.CaptureFixture[str]):
    assert launch(["--version"]) == 0
    assert capsys.readouterr().out == f"cascade-train {version('cascade-train')}\n"


@pytest.mark.parametrize("first", ["", "train", "task=lora", "+experiment=a", "~tracker", "--cfg", "-m"])
def test_overrides_and_options_of_hydra_begin_a_training(first: str):
    assert is_training([first]) == is_training([first, "export"]) is True
    assert is_training([]) is True
    assert is_training(["export", "from=x"]) is False


def test_defects_and_refusals_are_raised_where_the_user_asks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="'exprot' is not a command"):
        launch(["exprot"])


def test_a_command_that_writes_files_runs_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(["shapes", "out=a"]) == 2
    assert "this command runs in one process: start it without torchrun" in capsys.readouterr().err


def test_a_word_fills_the_first_key_that_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["checkpoints", "verify", "from=r", "step_5"]) == 2
    assert "step_5" not in capsys.readouterr().err
