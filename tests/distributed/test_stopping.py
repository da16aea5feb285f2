"""Orderly and sudden ends on two ranks, and what the next start makes of them."""

import json

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.distributed.test_modes import fork, said
from tests.integration.runs import read_metrics

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMON = (*SMALL_NETWORK, "task=finetune", "ema.decay=0.9")
LONG = (*COMMON, "train.max_steps=11", "checkpoint.every_steps=5", "log.every_steps=1")
SHORT = (*COMMON, "train.max_steps=5", "checkpoint.every_steps=2")
RUNS = {
    "whole": (2, None, LONG),
    "signalled": (2, "stopping_hooks.terminate_rank_one", LONG),
    "again@signalled": (2, "stopping_hooks.warn_rank_zero", LONG),
    "third@signalled": (2, "stopping_hooks.interrupt_both", LONG),
    "limited@signalled": (2, None, (*LONG, "run.max_hours=1e-6")),
    "last@signalled": (2, None, LONG),
    "killed": (2, "stopping_hooks.kill_rank_one", SHORT),
    "held@killed": (2, "stopping_hooks.hold_rank_one", (*SHORT, "run.timeout_seconds=5")),
    "next@killed": (2, None, SHORT),
    "waiting": (2, "stopping_hooks.starve_rank_one", SHORT),
}
CODES = dict.fromkeys(("signalled", "again@signalled", "third@signalled", "limited@signalled"), 75)
CODES |= {"killed": [1, -9], "held@killed": 1, "waiting": [1, 75]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks said."""
    return fork(tmp_path_factory.mktemp("stopping"), RUNS, CODES)


@pytest.mark.parametrize(
    ("name", "reason", "step"),
    [
        ("signalled", "SIGTERM on rank 1", 2),
        ("again@signalled", "SIGUSR1 on rank 0", 5),
        ("third@signalled", "SIGINT", 8),
        ("limited@signalled", "run.max_hours", 10),
    ],
)
def test_what_any_rank_hears_stops_all_on_the_same_step_and_is_said_once(runs, name, reason, step):
    heard = said(runs, name)
    assert heard.count(f"Stopped by {reason} at step {step}; saved. The same command continues.\n") == 1
    assert heard.count("Stopped by") == 1
    assert "Traceback" not in heard


def test_a_run_stopped_four_times_equals_one_that_never_was(runs):
    assert read_metrics(runs / "signalled") == read_metrics(runs / "whole")
    assert json.loads((runs / "signalled" / "export" / "exported.json").read_text())["step"] == 11


def test_a_stop_saves_once_and_leaves_a_note_until_the_run_goes_on(runs):
    assert [path.name for path in sorted((runs / "signalled" / "checkpoints").iterdir())] == ["step_10", "step_11"]
    assert not (runs / "signalled" / "stopped.json").exists()


@pytest.mark.parametrize("name", ["killed", "held@killed"])
def test_the_others_end_and_name_the_cause_where_a_rank_is_killed_or_hangs(runs, name):
    heard = said(runs, name)
    assert "The connection to another rank was lost" in heard
    assert "The same command continues" in heard


def test_a_signal_ends_a_rank_that_waits_for_data_and_with_it_the_others(runs):
    assert "Rank 1 waited for data in vain" in said(runs, "waiting")


def test_the_next_start_continues_after_a_rank_was_killed_and_after_one_hung(runs):
    assert "Continuing at step 4" in said(runs, "next@killed")
    assert read_metrics(runs / "killed") == read_metrics(runs / "whole")[:5]
