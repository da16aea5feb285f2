"""What a signal and a limit of time do to a run of one rank; several are in tests/distributed/test_stopping.py."""

import signal

import pytest

from cascade_train.assembly.run import _time_limit
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.faults import stopping
from cascade_train.engine.faults.stopping import Request, Stopping, TimeLimit, code_of_stop, seconds_since_start
from cascade_train.errors import RunError
from cascade_train.signals import STOP_SIGNALS, Signals
from tests.unit.config.composing import checked
from tests.unit.engine.test_loop import build_trainer


@pytest.fixture
def signals():
    with Signals() as signals:
        yield signals


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set: the age of the process, and the time that passes."""
    times = {"now": 0.0}
    monkeypatch.setattr(stopping, "seconds_since_start", lambda: times["now"])
    monkeypatch.setattr(stopping.time, "monotonic", lambda: times["now"])
    return times


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_between_steps_waits_for_the_vote(world, signals, number):
    asked = Stopping(signals=signals, limit=TimeLimit(max_hours=None), timeout_seconds=5)
    signals.wait_for_votes()
    assert asked.vote(save_failed=False, save_seconds=0.0) == Request(0)
    signal.raise_signal(number)
    assert asked.vote(save_failed=False, save_seconds=0.0) == Request.STOP
    assert asked.agreed_reason() == number.name


def test_a_failed_save_ends_the_run_on_the_step_on_which_all_know(world, tmp_path, monkeypatch):
    trainer = build_trainer(world, tmp_path, max_steps=50, checkpoint=20)
    trainer.stopping = Stopping(signals=Signals(), limit=TimeLimit(max_hours=None), timeout_seconds=5)
    monkeypatch.setattr(CheckpointStore, "failed", property(lambda store: trainer.step == 3))
    monkeypatch.setattr(trainer.store, "wait", fail)
    with pytest.raises(RunError, match="as a full disk"):
        trainer.run()
    assert trainer.step == 3


def fail():
    raise RunError("as a full disk")


def test_a_signal_in_the_last_step_stops_nothing(world, tmp_path, monkeypatch):
    trainer = build_trainer(world, tmp_path, max_steps=3)
    trainer.stopping = Stopping(signals=Signals(), limit=TimeLimit(max_hours=None), timeout_seconds=5)
    monkeypatch.setattr(Stopping, "vote", lambda self, **_: Request.STOP if trainer.step == 3 else Request(0))
    monkeypatch.setattr(trainer, "stop", lambda: pytest.fail("a run that has ended was stopped"))
    trainer.run()
    assert trainer.step == 3


def test_the_limit_leaves_time_for_two_steps_and_a_save(clock):
    limit = TimeLimit(max_hours=1000 / 3600)
    for clock["now"] in (50.0, 60.0, 90.0, 100.0):  # set-up with the first step, then steps of 10, 30 and 10 s
        limit.end_step()
    clock["now"] = 889.0  # two steps of 30 s, and 50 s in the place of a save that none is known of yet
    assert not limit.is_reached()
    clock["now"] = 890.0
    assert limit.is_reached()


@pytest.mark.parametrize(("rare", "seconds"), [("validate.every_steps=300", 40.0), ("log.every_steps=300", 1.0)])
def test_a_step_with_a_rare_validation_counts_until_the_next(clock, rare, seconds):
    own = ("model=c_tiny", "task=lora", "sample.every_steps=null", "validate.share=0.1", "run.max_hours=1")
    limit = _time_limit(checked(*own, rare))
    for step in range(600):
        clock["now"] += 40.0 if step == 300 else 1.0
        limit.end_step()
        limit.note_save(1.0)
    clock["now"] = 3600.0 - 2 * seconds - 1.0 - 0.5
    assert not limit.is_reached()
    clock["now"] += 0.5
    assert limit.is_reached()


def test_a_save_is_no_part_of_a_step_and_the_longest_counts(clock):
    limit = TimeLimit(max_hours=1000 / 3600)
    limit.end_step()
    for clock["now"], seconds in ((310.0, 300.0), (320.0, 5.0)):  # steps of 10 and of 5 s, beside their saves
        limit.end_save(seconds)
        limit.end_step()
    clock["now"] = 679.0
    assert not limit.is_reached()
    clock["now"] = 680.0
    assert limit.is_reached()


def test_a_save_beside_the_loop_counts_by_its_own_time(world, clock):
    limit = TimeLimit(max_hours=1000 / 3600)
    asked = Stopping(signals=Signals(), limit=limit, timeout_seconds=5)
    assert asked.vote(save_failed=False, save_seconds=0.0) == Request(0)
    clock["now"] = 100.0
    assert asked.vote(save_failed=False, save_seconds=500.0) == Request(0)
    clock["now"] = 200.0
    assert asked.vote(save_failed=False, save_seconds=500.0) == Request(0)
    clock["now"] = 300.0
    assert asked.vote(save_failed=False, save_seconds=0.0) == Request.STOP


def test_a_limit_that_was_reached_stays_so(clock):
    limit = TimeLimit(max_hours=1000 / 3600)
    clock["now"] = 600.0
    limit.end_step()
    assert limit.is_reached(), "600 s of set-up stand for a save"
    limit.end_save(1.0)
    assert limit.is_reached()
    assert not TimeLimit(max_hours=None).is_reached()


def test_the_clock_is_that_of_the_process_and_under_torchrun_of_its_parent(monkeypatch):
    own = seconds_since_start()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    assert 0 < own <= seconds_since_start()


@pytest.mark.parametrize(("restarts", "most", "code"), [("0", "0", 75), ("0", "1", 0), ("1", "1", 75)])
def test_torchrun_is_told_success_while_it_would_start_the_run_again(monkeypatch, restarts, most, code):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert code_of_stop() == 75
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
    assert code_of_stop() == code


def test_what_the_only_rank_wants_is_agreed_at_once(world):
    never, now = (Stopping(signals=Signals(), limit=TimeLimit(max_hours=h), timeout_seconds=5) for h in (None, 0.0))
    assert never.vote(save_failed=True, save_seconds=0.0) == Request.SAVE_FAILED
    assert now.vote(save_failed=False, save_seconds=0.0) == Request.STOP
    assert now.vote(save_failed=True, save_seconds=0.0) == Request.STOP | Request.SAVE_FAILED
