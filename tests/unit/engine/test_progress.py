"""The bar and the lines."""

import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
from types import SimpleNamespace

import pytest

from cascade_train.engine import progress as module
from cascade_train.engine.progress import Progress, describe_row


def row(step, **values):
    return {"step": step, "samples_seen": 8 * step, "loss": 0.25, "images_per_second": 4.04, **values}


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


def test_time_left_is_images_left_over_speed():
    text = describe_row(row(10, images_per_second=4.0), 1810)
    assert text == "loss 0.2500  4.0 images/s  1:00:00 left"


def test_what_is_not_known_is_left_out():
    assert describe_row(row(1, loss=None, images_per_second=None), 10) == ""
    assert describe_row(row(1, images_per_second=None, data_wait_share=0.07), 10) == "loss 0.2500  data wait 7 %"


@pytest.mark.parametrize(("every_steps", "shown"), [(10, [10, 20, 25]), (None, [25]), (1, list(range(7, 26)))])
def test_without_a_terminal_lines_come_at_their_cadence_and_at_the_end(no_terminal, every_steps, shown):
    progress = Progress(max_steps=25, is_main=True, every_steps=every_steps)
    for step in range(7, 26):
        progress.update(row(step))
    progress.close()
    assert [message.split()[1] for message in no_terminal.messages] == [f"{step}/25" for step in shown]
    assert no_terminal.messages[-1] == "step 25/25  loss 0.2500  4.0 images/s  0:00:00 left"


def test_a_terminal_gets_a_bar_that_follows_the_steps(terminal):
    progress = Progress(max_steps=10, is_main=True)
    for step in (5, 6, 10):
        progress.update(row(step))
    progress.close()
    progress.close()
    shown = terminal.getvalue().split("\r")
    assert any(" 0/10 " in line for line in shown)
    assert any(" 10/10 " in line and "loss 0.2500  4.0 images/s  0:00:00 left" in line for line in shown)


@pytest.mark.parametrize("sees", ["terminal", "no_terminal"])
def test_other_ranks_show_nothing(request, sees, caplog):
    where = request.getfixturevalue(sees)
    progress = Progress(max_steps=10, is_main=False)
    progress.update(row(10))
    progress.close()
    assert caplog.messages == []
    assert sees == "no_terminal" or where.getvalue() == ""


def test_validation_is_reported_when_it_is_measured(no_terminal):
    progress = Progress(max_steps=25, is_main=True, every_steps=10)
    progress.update(row(7, **{"validate/loss": 0.5, "validate/loss_logsnr_-6": 0.9, "validate_ema/loss": None}))
    assert no_terminal.messages == ["step 7/25  validate/loss 0.5000  validate_ema/loss not finite"]


SCRIPT = """
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
from cascade_train.engine.progress import Progress
progress = Progress(max_steps=4, is_main=True)
for step in range(1, 5):
    progress.update({"step": step, "samples_seen": step, "loss": 0.5, "images_per_second": 1.0})
    logging.getLogger("cascade_train.somewhere").warning("message %d", step)
progress.close()
logging.warning("after the end")
"""


def on_a_terminal(script: str, columns: int = 100) -> list[str]:
    """Return the lines that are left on the screen of a terminal in which Python ran a script."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        os.execv(sys.executable, [sys.executable, "-c", script])
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the child has ended
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lines = [line.strip("\r").split("\r") for line in shown.decode().split("\n")]
    return [parts[-1].strip() or parts[0].strip() for parts in lines if parts[-1].strip()]


def test_messages_never_break_into_the_bar():
    lines = on_a_terminal(SCRIPT)
    assert [line for line in lines if "message" in line] == [f"message {step}" for step in range(1, 5)]
    assert lines[-1] == "after the end"
    assert "4/4" in lines[-2]
    assert len(lines) == 6, lines


def test_a_terminal_of_unknown_width_gets_lines():
    lines = on_a_terminal(SCRIPT, columns=0)
    assert [line for line in lines if line.startswith("step ")][-1].startswith("step 4/4  loss 0.5000")
    assert len(lines) == 9, lines
