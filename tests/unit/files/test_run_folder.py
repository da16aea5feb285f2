"""A run before its first checkpoint, from its first file on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascade_train.commands.evaluate import EvaluateArgs, evaluate
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.commands.merge import MergeArgs, merge
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import is_run, no_checkpoint_yet
from tests.integration.runs import train


def test_a_young_run_has_no_checkpoint_yet(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "environment.json").write_text("{}")
    assert is_run(tmp_path)
    assert "wait for one (checkpoint.every_steps)" in str(no_checkpoint_yet(tmp_path))
    (tmp_path / "checkpoints" / "step_50").mkdir(parents=True)
    assert no_checkpoint_yet(tmp_path) is None


def test_an_export_and_a_folder_of_checkpoints_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert not is_run(tmp_path)
    (tmp_path / "prior").mkdir()
    (tmp_path / "prior" / "config.yaml").touch()
    assert not is_run(tmp_path / "prior")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LoRA as it stands while the first step is taken."""
    run = train(tmp_path_factory.mktemp("runs") / "live", "task=lora", "train.max_steps=2", "checkpoint.every_steps=2")
    for name in ("export", "checkpoints", "metrics.jsonl"):
        path = run / name
        path.rename(run.with_name(name))
    return run


def test_what_needs_a_checkpoint_says_that_there_is_none_yet(live: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = r"live: this run has no checkpoint yet\. If it is running, wait for one"
    for formats in (None, "kohya"):
        with pytest.raises(ConfigError, match=f"^from=.*{words}"):
            export(ExportArgs(source=str(live), format=formats, out=out))
    with pytest.raises(ConfigError, match=f"^from=.*{words}"):
        generate(GenerateArgs(source=str(live), prompts=["a star"], out=out))
    with pytest.raises(ConfigError, match=f"^from=.*{words}"):
        evaluate(EvaluateArgs(source=str(live), features="package:tiny", out=out))
    with pytest.raises(ConfigError, match=f"^lora=.*export/lora: {words[6:]}"):
        merge(MergeArgs(source="package:tiny", model="c_tiny", lora=str(live), out=out))
    assert not list(tmp_path.iterdir())
