"""YAML by libyaml: the values and the messages of OmegaConf's own loader, its texts, and files as they are now."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf._utils import OmegaConfDumper

from cascade_train.__main__ import launch
from cascade_train.config.groups import conf_dir
from cascade_train.config.hydra_compat import YamlLoader, _Plain
from cascade_train.config.launch import register_schema
from cascade_train.config.saved import composed, to_plain
from cascade_train.files.plain_yaml import to_yaml


def test_every_file_of_conf_has_the_same_values_by_both_parsers():
    files = sorted(conf_dir().rglob("*.yaml"))
    assert len(files) > 60
    for file in files:
        text = file.read_text()
        assert repr(yaml.load(text, YamlLoader)) == repr(yaml.load(text, _Plain)), file  # noqa: S506


@pytest.mark.parametrize("text", ["a: 1e-4\nb: 2001-01-01\nc: off\nd: 010\ne: .5\n", "", "[a, {b: c}]", "é: 'x\ty'"])
def test_scalars_are_resolved_as_omegaconf_does(text: str):
    assert repr(yaml.load(text, YamlLoader)) == repr(yaml.load(text, _Plain))  # noqa: S506


@pytest.mark.parametrize(
    "text", ["a: [1\nb: 2\n", "a: 1\na: 2\n", "a: b: c\n", "a:\n\tb: 1\n", "a: !!python/name:os x"]
)
def test_what_is_wrong_is_said_in_the_words_of_the_plain_parser(tmp_path: Path, text: str):
    (tmp_path / "a.yaml").write_text(text)
    said = []
    for loader in (YamlLoader, _Plain):
        with (tmp_path / "a.yaml").open() as file, pytest.raises(yaml.YAMLError) as refused:
            yaml.load(file, loader)  # noqa: S506
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "a.yaml" in said[0]


def test_a_file_that_changes_is_read_as_it_is_now(tmp_path: Path):
    register_schema()
    for value in (1, 2):
        (tmp_path / "a.yaml").write_text(f"a: {value}\n")
        assert OmegaConf.load(tmp_path / "a.yaml") == {"a": value}


TEXTS = [
    "1e3",
    "1_000",
    "0o7",
    "yes",
    "null",
    "~",
    "",
    " x",
    "a: b",
    "é 図 😀",
    "a\nb\n",
    "'",
    "word " * 60,
    "${a.b}",
    "1:30",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_written_so_that_they_are_read_as_texts(text: str):
    register_schema()
    written = OmegaConf.to_yaml({"key": [text], text: 1})
    assert yaml.load(written, _Plain) == {"key": [text], text: 1}  # noqa: S506
    assert yaml.safe_load(to_yaml({"key": [text], text: 1})) == {"key": [text], text: 1}


def test_configurations_are_written_as_the_plain_emitter_does():
    register_schema()
    cfg = composed(["model=c_tiny", "task=lora", "run.name=x", "data.captions.template='a photo of {caption}'"])
    plain = to_plain(cfg)
    assert OmegaConf.to_yaml(cfg, resolve=True) == yaml.dump(
        OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        Dumper=OmegaConfDumper,
        allow_unicode=True,
        sort_keys=False,
    )
    assert to_yaml(plain) == yaml.safe_dump(plain, sort_keys=False)


def said_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = launch(["--config-dir", str(folder), "experiment=mine", "task=finetune", "model=c_tiny", "--cfg=job"])
    told = capsys.readouterr()
    return told.out if code == 0 else told.err


def test_a_file_that_is_not_utf8_is_named_with_its_byte_and_a_mark_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    text = "# @package _global_\n# für\nrun:\n  seed: 17\n"
    file.write_bytes(text.encode("latin-1"))
    assert said_of(tmp_path, capsys) == f"{file} is not UTF-8: byte 0xfc at 23, line 2. Save it as UTF-8.\n"
    file.write_bytes(text.encode("utf-16"))
    assert said_of(tmp_path, capsys) == f"{file} is not UTF-8: byte 0xff at 0, line 1. Save it as UTF-8.\n"
    file.write_bytes(("#" * 9000 + text).encode("latin-1"))
    assert "byte 0xfc at 9023, line 2" in said_of(tmp_path, capsys)
    file.write_bytes(text.encode("utf-8-sig"))
    assert "  seed: 17\n" in said_of(tmp_path, capsys)
