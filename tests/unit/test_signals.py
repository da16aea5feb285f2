"""What asks a run to stop, and when it is heard."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cascade_train.errors import Interrupted
from cascade_train.signals import (
    SAME_REQUEST_SECONDS,
    STOP_SIGNALS,
    Signals,
    defer_signals,
    handling,
    stop_at_once,
    while_importing,
)


@pytest.fixture
def signals():
    with Signals() as signals:
        yield signals


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""
    times = {"now": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: times["now"])
    return times


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_set_up_ends_at_once(signals, number):
    with pytest.raises(Interrupted, match=f"Stopped by {number.name} before the first step") as ended:
        signal.raise_signal(number)
    assert ended.value.code == (130 if number == signal.SIGINT else 75)


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM once more, or Ctrl-C,")]
)
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_first_signal_is_answered_at_once_by_one_rank(signals, capfd, monkeypatch, number, again, rank, lines):
    monkeypatch.setenv("RANK", rank)
    signals.wait_for_votes()
    signal.raise_signal(number)
    line = f"{number.name}: saves and stops after this step. {again} ends the run at once, without saving.\n"
    assert capfd.readouterr().err == f"\n{line}" * lines


def test_ctrl_c_again_ends_at_once(signals):
    signals.wait_for_votes()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted, match="Ended at once by SIGINT") as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130


def test_the_same_signal_again_ends_at_once_unless_it_is_the_same_request(signals, clock):
    signals.wait_for_votes()
    signal.raise_signal(signal.SIGTERM)
    clock["now"] = SAME_REQUEST_SECONDS - 0.1
    signal.raise_signal(signal.SIGTERM)
    clock["now"] = SAME_REQUEST_SECONDS
    with pytest.raises(Interrupted, match="Ended at once by SIGTERM") as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_what_the_system_repeats_never_ends_a_save(signals, clock, number):
    signals.wait_for_votes()
    signal.raise_signal(number)
    clock["now"] = 60.0
    signal.raise_signal(number)
    assert signals.first == number


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_wait_ends_once_a_signal_has_been_pending_for_long(signals, comes_first):
    signals.wait_for_votes()
    if comes_first:
        signal.raise_signal(signal.SIGTERM)

    def wait():
        with signals.ending_a_wait(patience_seconds=0.1):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(Interrupted, match="Stopped by SIGTERM"):
        wait()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_schedulers_next_reminder_does_not_end_the_save_in_progress(signals, clock):
    signals.wait_for_votes()
    signal.raise_signal(signal.SIGUSR1)
    clock["now"] = 60.0
    signal.raise_signal(signal.SIGTERM)
    assert signals.first == signal.SIGUSR1


def test_handlers_of_before_are_back_afterwards_and_sigcont_has_none():
    every = (*STOP_SIGNALS, signal.SIGCONT)
    before = {each: signal.getsignal(each) for each in every}
    with Signals():
        assert [each for each in every if signal.getsignal(each) == before[each]] == [signal.SIGCONT]
    assert {each: signal.getsignal(each) for each in every} == before


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.first is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_than_the_main_one_sets_no_handlers():
    def handlers() -> list[object]:
        with Signals():
            return [signal.getsignal(each) for each in STOP_SIGNALS]

    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == before


def test_a_second_signal_does_not_disturb_the_clearing_up_after_the_first(signals):
    cleared = []

    def set_up():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # torchrun's
            signal.raise_signal(signal.SIGUSR1)  # train.sbatch's
            cleared.append(True)

    with pytest.raises(Interrupted, match="Stopped by SIGTERM before"):
        set_up()
    assert cleared


def test_a_stop_that_a_library_swallows_ends_set_up_all_the_same(signals):
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGUSR2)
    with pytest.raises(Interrupted, match="Stopped by SIGUSR2 before the first step"):
        signals.wait_for_votes()


def test_a_stop_that_a_library_made_another_error_of_is_the_stop():
    def import_library():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            raise ImportError("numpy failed to import") from None

    with pytest.raises(Interrupted, match="Stopped by SIGTERM before the first step"), Signals():
        import_library()


def test_what_must_not_be_left_half_done_is_finished_first(signals):
    done = []

    def write():
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append(True)

    with pytest.raises(Interrupted):
        write()
    assert done


@pytest.mark.parametrize(
    ("number", "rank", "lines"), [(signal.SIGINT, "0", 1), (signal.SIGUSR1, "1", 0), (signal.SIGHUP, "", 1)]
)
def test_during_imports_the_process_ends_at_once(number, rank, lines):
    program = f"""
import signal
from cascade_train.signals import set_handlers, stop_at_once
set_handlers(stop_at_once)
try:
    signal.raise_signal({int(number)})
finally:
    print("went on")
"""
    command, environment = [sys.executable, "-c", program], {**os.environ, "RANK": rank}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (130 if number == signal.SIGINT else 75)
    assert done.stdout == ""
    assert done.stderr.count(f"Stopped by {number.name} before the first step. The same command continues") == lines


def test_handlers_of_another_program_stay_while_importing(signals):
    with while_importing():
        assert signal.getsignal(signal.SIGTERM) is stop_at_once
    with handling(signal.SIG_DFL), while_importing():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
