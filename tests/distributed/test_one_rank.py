"""An error on one rank alone is reported by that rank, and the other one ends too."""

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.distributed.test_modes import fork, said
from tests.integration.runs import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMON = (*SMALL_NETWORK, "task=finetune", "train.global_batch_size=4", "train.max_steps=4", "checkpoint.every_steps=2")
ENDS = {
    "failed_on_one": ("fail_on_rank_one", "[rank 1] no more numbers"),
    "defect_on_one": ("defect_on_rank_one", "KeyError: 'defect'"),
    "failed_on_zero": ("fail_on_rank_zero", "no more numbers"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks said."""
    starts = {name: (2, f"one_rank_hooks.{hook}", COMMON) for name, (hook, _) in ENDS.items()}
    return fork(tmp_path_factory.mktemp("one_rank"), starts, dict.fromkeys(ENDS, 1))


@pytest.mark.parametrize("name", ENDS)
def test_the_rank_that_failed_reports_it_and_the_other_ends(runs, name):
    """How such a run goes on: test_faults.py."""
    heard = said(runs, name)
    assert ENDS[name][1] in heard
    assert heard.count("Traceback") == ("defect" in name)
    assert (runs / name).exists()


def test_the_report_of_torchrun_ends_with_what_was_refused(tmp_path):
    done = torchrun(2, "task=lora", "model=c_tiny", "train.max_steps=0", cwd=tmp_path, warm=True)
    refusal = "train.max_steps=0 must be 1 or more."
    assert done.stderr.splitlines()[-2] == f"  traceback : {refusal}"
    assert done.stderr.count(refusal) == 2
