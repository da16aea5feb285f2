"""Two ranks that are stopped and continued, by as many ranks or fewer, and that go on without a bad sample."""

import json
import random

import pytest
import torch

from cascade_train.commands.export import ExportArgs, export
from cascade_train.engine.checkpoint.folder import read_manifest
from tests.distributed.resume_hooks import NOT_FINITE
from tests.distributed.test_modes import NARROW, fork, said
from tests.integration.runs import exported_weights, read_metrics

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 4
STOP = random.Random("where two ranks stop").randrange(1, STEPS)
SHORT = (
    *(*NARROW, "train.micro_batch_size=2", "data.samples=24", "ema.decay=0.5", "ema.start_step=2", "log.every_steps=1"),
    *(f"train.max_steps={STEPS}", "checkpoint.keep_last=null", "data.num_workers=1", "parallel=fsdp"),
    "ema.post_hoc=[0.05,0.2]",
)
EXACT = ("task=finetune", *SHORT, "objective=adaptive", f"checkpoint.every_steps={STOP}")
LORA = ("task=lora", *SHORT, "model.weights={base}", "task.dropout=0.5", "optimizer.lr=1e-2", "train.precision=bf16")
SPOILED = ("task=finetune", *SHORT, "objective=adaptive", "checkpoint.every_steps=1")
ALONE = ("parallel=auto", "train.micro_batch_size=4", "data.num_workers=0")
RUNS = {
    "base": (2, "resume_hooks.note_keys", EXACT),
    "rest_of_base": (2, "resume_hooks.cut_back", EXACT),
    "alone_of_base": (1, "resume_hooks.cut_back", (*EXACT, *ALONE)),
    "lora": (2, None, (*LORA, "checkpoint.every_steps=2")),
    "rest_of_lora": (2, "resume_hooks.cut_back", (*LORA, "checkpoint.every_steps=2")),
    "spoiled": (2, "resume_hooks.spoil_one", SPOILED),
    "later@spoiled": (1, "resume_hooks.spoil_one", (*SPOILED, *ALONE, f"data.exclude=['{NOT_FINITE}']")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks noted."""
    return fork(tmp_path_factory.mktemp("resume"), RUNS, {"spoiled": 1})


def keys(directory, name):
    """Return the steps of a run in the order of training, each with the keys of its global batch."""
    files = sorted((directory / f"{name}_notes").glob("keys_*"))
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [(steps[0][0], [key for _, part in steps for key in part]) for steps in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", ["base", "lora"])
def test_two_ranks_stopped_and_continued_are_never_stopped(runs, name):
    first, again = runs / name, runs / f"rest_of_{name}"
    assert read_metrics(again) == read_metrics(first)
    whole, parts = (read_manifest(run / "checkpoints" / f"step_{STEPS}") for run in (first, again))
    assert parts.facts == whole.facts
    written = [file for file in whole.files if file.endswith(".distcp")]
    assert len(written) == 2
    assert [parts.files[file].sha256 for file in written] == [whole.files[file].sha256 for file in written]
    assert all(row["grad_norm"] > 0 for row in read_metrics(first))


def test_fewer_ranks_with_other_micro_batches_continue_with_the_same_samples(runs):
    assert keys(runs, "alone_of_base") == keys(runs, "base")[STOP:] == keys(runs, "rest_of_base")
    for two, one in zip(read_metrics(runs / "base"), read_metrics(runs / "alone_of_base"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    weights = exported_weights(runs / "alone_of_base")
    for name, value in exported_weights(runs / "base").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)


def test_an_average_is_built_alike_from_checkpoints_of_two_ranks_and_of_one(runs, tmp_path):
    """STEPS are few, so that the length is between the two that are kept."""
    for name in ("base", "alone_of_base"):
        args = ExportArgs(source=str(runs / name), average=0.1, out=str(tmp_path / name / "export"))
        assert export(args) == 0
    alone, own = exported_weights(tmp_path / "alone_of_base"), exported_weights(runs / "base")
    found = exported_weights(tmp_path / "base")
    for name, value in found.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(value, own[name]) for name, value in found.items())


def test_a_run_goes_on_without_the_sample_that_ended_it(runs):
    """The keys of the sample are those that the error names, and the plan of all others is as it was."""
    assert said(runs, "spoiled").count(f"""'data.exclude=["{NOT_FINITE}"]'""") == 1
    before, after = keys(runs, "spoiled"), keys(runs, "later@spoiled")
    assert ([step for step, _ in before], [step for step, _ in after]) == ([1, 2, 3], [3, 4])
    moved = [one for one, other in zip(before[2][1], after[0][1], strict=True) if one != other]
    assert moved == [NOT_FINITE]
    assert [row["step"] for row in read_metrics(runs / "spoiled")] == [1, 2, 3, 4]
