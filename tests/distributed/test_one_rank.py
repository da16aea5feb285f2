"""An error or a signal on one rank alone is said once, and the other rank names it and ends with the same code."""

import re

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.distributed.test_modes import fork, said
from tests.integration.runs import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMON = (*SMALL_NETWORK, "task=finetune", "train.global_batch_size=4", "train.max_steps=4", "checkpoint.every_steps=2")
ENDS = {
    "refused_on_one": (2, "refuse_on_rank_one", 1, "before the first step: model.weights=x is not there"),
    "stopped_on_one": (75, "stop_on_rank_one", 1, "before the first step: Stopped by SIGTERM before"),
    "failed_on_one": (1, "fail_on_rank_one", 1, "in step 3: no more numbers"),
    "defect_on_one": (1, "defect_on_rank_one", 1, "in step 3: KeyError('defect')"),
}
ZERO = {  # rank 1 reads the note, or finds that the store of all ranks ended with rank 0, whichever comes first
    "failed_on_zero": ([1, 1], "fail_on_rank_zero", "no more numbers"),
    "refused_on_zero": ([2, {1, 2}], "refuse_on_rank_zero", "model.weights=x is not there"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks said."""
    ends = ENDS | ZERO
    starts = {name: (2, f"one_rank_hooks.{hook}", COMMON) for name, (_, hook, *_) in ends.items()}
    codes = {name: code for name, (code, *_) in ends.items()}
    return fork(tmp_path_factory.mktemp("one_rank"), starts, codes)


@pytest.mark.parametrize("name", ENDS)
def test_the_other_rank_names_the_one_and_what_it_said(runs, name):
    _, _, rank, words = ENDS[name]
    heard = said(runs, name)
    assert heard.count(f"Rank {rank} on ") == heard.count("ended the run") == 1, heard
    assert f"ended the run {words}" in heard
    assert "Ranks are lost" not in heard
    assert "connection to another rank" not in heard
    assert heard.count("Traceback") == ("defect" in name)


@pytest.mark.parametrize("name", ZERO)
def test_where_the_notes_may_end_with_rank_zero_that_is_named(runs, name):
    heard = said(runs, name)
    lost = heard.count("[rank 1] Rank 0 has ended, and with it the store of all ranks")
    assert lost + len(re.findall(r"\[rank 1\] Rank 0 on \S+ ended the run", heard)) == 1, heard
    assert heard.splitlines().count(ZERO[name][2]) == 1, heard
    assert "Ranks are lost" not in heard


def test_a_start_that_ends_so_leaves_nothing_and_a_run_stays(runs):
    """How such a run goes on: test_faults.py."""
    stay = {name for name in ENDS | ZERO if (runs / name).exists()}
    assert stay == {"failed_on_one", "defect_on_one", "failed_on_zero"}


def test_the_report_of_torchrun_ends_with_what_was_refused(tmp_path):
    done = torchrun(2, "task=lora", "model=c_tiny", "train.max_steps=0", cwd=tmp_path, warm=True)
    refusal = "train.max_steps=0 must be 1 or more."
    assert done.stderr.splitlines()[-2] == f"  traceback : {refusal}"
    assert done.stderr.count(refusal) == 2
