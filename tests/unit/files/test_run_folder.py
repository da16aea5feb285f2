"""A run before its first checkpoint, from its first file on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cascade_train.commands.evaluate import EvaluateArgs, evaluate
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.commands.merge import MergeArgs, merge
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import is_run, no_checkpoint_yet
from tests.integration.runs import train


def young(folder: Path, checkpoint: str = "{every_steps: 50}", last: str = "120", step: int = 0) -> Path:
    """Write what a run has before its first checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"checkpoint: {checkpoint}\ntrain: {{max_steps: {last}}}\n")
    (folder / "environment.json").write_text("{}")
    if step:
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(step)))
    return folder


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({}, "It is at step 0, and saves the next at step 50. If it"),
        ({"step": 50}, "It is at step 50, and saves the next at step 100. If it"),
        ({"step": 101}, "It is at step 101, and saves the next at step 120. If it"),
        ({"checkpoint": "{every_steps: null}"}, "saves the next at step 120."),
        ({"checkpoint": "{every_steps: null}", "last": "null"}, "saves one at its end."),
        ({"checkpoint": "{every_steps: 50, every_epochs: 2}"}, "saves one every 2 epochs."),
        ({"checkpoint": "[1]"}, "saves one at its end at the latest."),
    ],
)
def test_a_young_run_says_when_it_saves(tmp_path: Path, run: dict[str, object], words: str) -> None:
    folder = young(tmp_path, **run)  # type: ignore[arg-type]
    assert is_run(folder)
    assert words in str(no_checkpoint_yet(folder))
    (folder / "checkpoints" / "step_50").mkdir(parents=True)
    assert no_checkpoint_yet(folder) is None


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
    words = r"live: this run has no checkpoint yet\. It is at step 0, and saves the next at step 2"
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
