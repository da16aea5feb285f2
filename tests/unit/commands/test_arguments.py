from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from omegaconf import MISSING

from cascade_train.commands.arguments import help_text, parse_verb
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
    draw = parse_verb(Draw, ["from=runs/a", "prompts=[a red circle, 'b, c']", "steps=5", "format=webp", "out=null"])
    assert draw == Draw(source="runs/a", prompts=["a red circle", "b, c"], steps=5, format=Format.webp)


def test_braces_in_a_value_are_kept():
    assert parse_verb(Draw, ["from=a-{000..005}.tar"]).source == "a-{000..005}.tar"


def test_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"promts is unknown. Did you mean prompts\?"):
        parse_verb(Draw, ["promts=[a]"])


def test_field_behind_an_alias_is_not_a_key():
    with pytest.raises(ConfigError, match="source is unknown. Known here: from, prompts"):
        parse_verb(Draw, ["source=a"])


@pytest.mark.parametrize("argument", ["prompts", "--steps=3"])
def test_word_that_is_no_argument_is_refused(argument: str):
    with pytest.raises(ConfigError, match=f"{argument}' is not an argument. Write key=value"):
        parse_verb(Draw, [argument])


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
        ("format=gif", "Invalid value 'gif', expected one of"),
        ("out={a", "while parsing a flow mapping"),
    ],
)
def test_value_that_does_not_fit_is_refused(argument: str, reason: str):
    with pytest.raises(ConfigError, match=f"'{argument}' cannot be read: {reason}"):
        parse_verb(Draw, [argument])


def test_missing_field_is_refused_with_its_meaning():
    with pytest.raises(ConfigError, match="from is not set: Folder of a run or an export. Set it: from=<value>"):
        parse_verb(Draw, [])


def test_help_prints_every_field_and_exits(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse_verb(Draw, ["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == help_text(Draw)
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
        assert parse_verb(Draw, [f"from=sweep/{name}"]).source == f"sweep/{name}"
        monkeypatch.chdir(tmp_path / "sweep")
        assert parse_verb(Draw, [f"from={name}"]).source == name
        monkeypatch.chdir(tmp_path)
    given = ["sweep/lr=0.0001,rank=4", "missing", "sweep/lr=0.001,rank=4"]
    assert parse_verb(Draw, ["from=a", f"prompts=[{','.join(given)}]"]).prompts == given


def test_a_file_named_like_a_number_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5").mkdir()
    assert parse_verb(Draw, ["from=a", "steps=5"]).steps == 5
