"""The bar and the lines."""

import io
import logging
from types import SimpleNamespace

import pytest

from cascade_train.engine import progress as module
from cascade_train.engine.progress import Progress, describe_row


def row(step, **values):
    return {"step": step, "samples_seen": 8 * step, "loss": 0.25, "images_per_second": 12.34, **values}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=terminal))
    return terminal


@pytest.fixture
def no_terminal(monkeypatch, caplog):
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=io.StringIO()))
    caplog.set_level(logging.INFO, logger=module.__name__)
    return caplog


def test_a_row_in_words():
    text = "loss 0.2500  12.3 images/s  data wait 7 %"
    assert describe_row(row(1, data_wait_share=0.07)) == text
    assert describe_row(row(1, loss=None, images_per_second=None)) == ""


def test_without_a_terminal_lines_come_at_their_cadence_and_at_the_end(no_terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress(max_steps=25, is_main=True, every_steps=10)
    for step in range(1, 26):
        now[0] += 60.0
        progress.update(row(step))
    progress.close()
    assert no_terminal.messages == [
        "step 10/25  loss 0.2500  12.3 images/s  0:15:00 left",
        "step 20/25  loss 0.2500  12.3 images/s  0:05:00 left",
        "step 25/25  loss 0.2500  12.3 images/s  0:00:00 left",
    ]


def test_time_left_of_a_resumed_run_counts_its_own_steps(no_terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress(max_steps=100, is_main=True, first_step=80)
    now[0] = 10.0
    progress.update(row(90))
    assert "0:00:10 left" in no_terminal.messages[0]


def test_a_terminal_gets_a_bar_that_follows_the_steps(terminal):
    progress = Progress(max_steps=10, is_main=True, first_step=4)
    for step in (5, 6, 10):
        progress.update(row(step))
    progress.close()
    progress.close()
    shown = terminal.getvalue().split("\r")
    assert any(" 4/10 " in line for line in shown)
    assert any(" 10/10 " in line and "loss 0.2500  12.3 images/s" in line for line in shown)


@pytest.mark.parametrize("sees", ["terminal", "no_terminal"])
def test_other_ranks_show_nothing(request, sees, caplog):
    where = request.getfixturevalue(sees)
    progress = Progress(max_steps=10, is_main=False)
    progress.update(row(10))
    progress.close()
    assert caplog.messages == []
    assert sees == "no_terminal" or where.getvalue() == ""
