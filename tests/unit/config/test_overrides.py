import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from cascade_train.config.overrides import check_not_expanded, parses, quoted_form, refusal, with_paths_quoted
from cascade_train.errors import ConfigError

REPAIRED = {
    "data.urls=[a-{000..005}.tar]": ["a-{000..005}.tar"],
    "data.urls=a-{000..005}.tar": "a-{000..005}.tar",
    "data.urls=[a-{000..005}.tar, b/c.tar]": ["a-{000..005}.tar", "b/c.tar"],
    "data.urls=[s3://b/x?y=1,c]": ["s3://b/x?y=1", "c"],
    "data.row_filters=[[width, lambda w: w>512]]": [["width", "lambda w: w>512"]],
    "data.row_filters={width: lambda w: w > 512}": {"width": "lambda w: w > 512"},
    "task.module_filters=[^attn.*(q|k)$]": ["^attn.*(q|k)$"],
    "sample.prompts=[a (red) circle, blue]": ["a (red) circle", "blue"],
    "sample.prompts=[it's]": ["it's"],
    "sample.prompts=a red circle, a (blue) square": "a red circle, a (blue) square",
    'run.name=say"hi"(twice)': 'say"hi"(twice)',
    "run.dir=a#b\\": "a#b\\",
}


@pytest.mark.parametrize("override", REPAIRED)
def test_refused_override_is_answered_with_a_form_that_parses_to_the_same_value(override: str):
    assert not parses(override)
    form = quoted_form(override)
    assert form is not None
    assert form in refusal(override)
    (word,) = shlex.split(form)
    parsed = OverridesParser.create().parse_override(word)
    assert parsed.key_or_group == override.partition("=")[0]
    assert plain(parsed.value()) == REPAIRED[override]


def plain(value: object) -> object:
    """Return a parsed value with Hydra's quoted texts and keys as plain ones."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.urls=[a,b", r"a \[ is not closed"),
        ("data.urls=a]", "a ] is not opened"),
        ('run.name="b', 'a " is not closed'),
        ("train", "'train' is not an override. Write key=value, with no spaces around =; .* 'sample.prompts="),
        ("task=lora,model=c_tiny", "holds 2 overrides. Separate them by spaces: task=lora model=c_tiny"),
        ("run.name=x,data.path=a,b=1", """Write: 'run.name="x,data.path=a,b=1"'"""),
        ("a b=3", "'a b' is not a path of names"),
    ],
)
def test_override_beyond_repair_is_refused_with_the_reason(override: str, reason: str):
    assert re.search(reason, refusal(override))


@pytest.mark.parametrize("override", ["a=b", "a.b=[1,2]", "+a={b:c}", "a=null", "a='x y'"])
def test_good_overrides_parse_and_a_sweep_does_not(override: str):
    assert parses(override)
    assert not parses(f"{override},{override}")


def test_braces_that_the_shell_expanded_are_refused_with_the_pattern():
    expanded = [f"data.urls=[shards/a-{i:03d}.tar]" for i in range(6)]
    with pytest.raises(
        ConfigError, match=r"for consecutive numbers: the shell .*'data.urls=\[\"shards/a-\{000..005\}.tar\"\]'"
    ):
        check_not_expanded(["task=lora", *expanded])


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=1", "optimizer.lr=2"],
        ["run.name=exp1", "run.name=exp2"],
        ["data.urls=[a-1.tar]", "data.urls=[b-2.tar]"],
        ["data.urls=[a-1.tar]", "train.max_steps=2"],
        ["data.urls=[a-1.tar]", "data.urls=[a-1.tar]"],
    ],
)
def test_a_key_set_again_is_no_expansion(overrides: list[str]):
    check_not_expanded(overrides)


def test_existing_path_that_the_grammar_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lr=0.0001,rank=4", "plain", 'say "a"=b'):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (word,) = with_paths_quoted([f"model.weights=sweep/{name}"])
        assert str(OverridesParser.create().parse_override(word).value()) == f"sweep/{name}"
    untouched = ["model.weights=sweep/plain", "model.weights=sweep/lr=9", "--config-dir", f"a={'x' * 5000}=", "a="]
    assert with_paths_quoted(untouched) == untouched
