"""An evaluation makes the same pictures on any number of ranks, and after a kill those that are missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.distributed.evaluate_hooks import WHOLE
from tests.distributed.test_modes import NARROW
from tests.integration.runs import SMALL
from tests.warm.programs import warm_programs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROMPTS = ["a red circle", "a blue star", "a green square", "a small red circle", "a big yellow triangle"]
STEPS = ("steps=1", "sampler=ddim", "batch_size=2")
JUDGED = ("features=package:tiny", *STEPS)
CASCADE = ("from=package:tiny", "decoder=package:tiny", "decoder_steps=1")
SEMANTIC, VQ = 16, 4
"""Channels of the latents of Stage C and of Stage B."""


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of evaluations: `two` by two ranks, `again` killed on one and continued by two; a watched `run`."""
    folder = tmp_path_factory.mktemp("evaluations")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "real").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "real" / f"noise {number}.png")
    judged = ["evaluate", *JUDGED, f"prompts=@{folder}/prompts.txt", f"real={folder}/real"]
    argv = [*judged, *CASCADE]
    run = [*SMALL, *NARROW, "task=finetune", f"run.dir={folder / 'run'}", "train.max_steps=2"]
    wanted = [
        (2, None, [*argv, f"out={folder / 'two'}"]),
        (1, "evaluate_hooks.die_while_writing", [*argv, f"out={folder / 'again'}"]),
        (2, "evaluate_hooks.note_samples", [*argv, f"out={folder / 'again'}"]),
        (1, None, run),
        (2, "evaluate_hooks.see_no_checkpoint_but_on_rank_zero", [*judged, f"watch={folder / 'run'}"]),
    ]
    runs = [
        {"ranks": ranks, "hook": hook, "argv": given, "out": str(folder / f"notes_{number}")}
        for number, (ranks, hook, given) in enumerate(wanted)
    ]
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [str(warm_programs() / "python"), str(Path(__file__).with_name("forked.py")), str(folder / "runs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    codes = json.loads((done.stdout.splitlines() or ["null"])[-1])
    assert codes == [[0, 0], [-9], [0, 0], [0], [0, 0]], said(folder) + done.stderr
    return folder


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("notes_*/said_?")))


def test_a_killed_evaluation_continues_to_the_same_pictures_and_numbers(evaluations: Path) -> None:
    first, again = (
        {path.name: path.read_bytes() for path in sorted((evaluations / name / "pictures").glob("[0-9]*.png"))}
        for name in ("two", "again")
    )
    assert list(first) == [f"{number:06d}.png" for number in range(len(PROMPTS))]
    assert first == again
    assert len(set(first.values())) == len(PROMPTS)
    metrics = [json.loads((evaluations / name / "metrics.json").read_text()) for name in ("two", "again")]
    assert metrics[0]["measures"] == metrics[1]["measures"]
    assert metrics[0]["measures"].keys() == {"fid", "kid", "kid_std", "precision", "recall"}


def test_what_was_there_is_not_made_again(evaluations: Path) -> None:
    lines = [line for path in sorted(evaluations.glob("notes_2/sampled_?")) for line in path.read_text().splitlines()]
    missing = [f"{PROMPTS[2]}; {PROMPTS[3]}", PROMPTS[4]]
    assert sorted(lines) == sorted(f"{channels} {prompts}" for channels in (SEMANTIC, VQ) for prompts in missing), (
        f"of batches of two, {WHOLE} pictures fill one"
    )
    assert said(evaluations).count("5 images of from=package:tiny") == 2, "rank 0 alone speaks"


def test_rank_zero_alone_looks_whether_a_watched_checkpoint_is_whole(evaluations: Path) -> None:
    (line,) = (evaluations / "run" / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2
    assert "1 checkpoints of" in (evaluations / "notes_4" / "said_0").read_text()
