"""A configuration file that is not UTF-8 is named, and Hydra is left as it was."""

from pathlib import Path

import pytest
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from cascade_train import compose
from cascade_train.__main__ import launch
from cascade_train.errors import ConfigError


def test_hydra_and_omegaconf_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ConfigRepository.load_config, OmegaConf.save
    compose("model=c_tiny", "task=lora")
    assert launch(["model=c_tiny", "task=lora", "--cfg=job"]) == 0
    assert (ConfigRepository.load_config, OmegaConf.save) == before


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
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="mine.yaml is not UTF-8"):
        compose("experiment=mine", "task=finetune", "model=c_tiny", config_dir=tmp_path)
