"""Measurements: kept on the device, written once per step, exact."""

import json
import math
import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from cascade_train.engine import metrics as module
from cascade_train.engine.metrics import MetricsLog
from cascade_train.errors import RunError


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def log(tmp_path):
    (tmp_path / "run").mkdir()
    return MetricsLog(tmp_path / "run" / "metrics.jsonl", is_main=True)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_one_line_in_order(log, tmp_path):
    for step in (1, 2, 3):
        log.record(step, 8 * step, {"loss": torch.tensor(0.5 * step), "lr": 1e-4})
    rows = log.flush()
    log.record(4, 32, {"loss": torch.tensor(2.0), "lr": 1e-4})
    rows += log.flush()
    assert [list(row) for row in rows] == [["step", "samples_seen", "loss", "lr", "images_per_second"]] * 4
    assert [(row["step"], row["samples_seen"], row["loss"]) for row in rows] == [
        (1, 8, 0.5), (2, 16, 1.0), (3, 24, 1.5), (4, 32, 2.0)
    ]  # fmt: skip
    assert lines(tmp_path) == rows


def test_numbers_survive_the_file_exactly(log, tmp_path):
    exact = torch.rand(1000, dtype=torch.float32) * 10 ** torch.linspace(-30, 30, 1000)
    for step, value in enumerate(exact, start=1):
        log.record(step, step, {"loss": value, "count": torch.tensor(2**40 + step), "lr": 0.1 + 0.2})
    log.flush()
    read = lines(tmp_path)
    assert torch.equal(torch.tensor([row["loss"] for row in read], dtype=torch.float32), exact)
    assert [row["count"] for row in read] == [2**40 + step for step in range(1, 1001)]
    assert {row["lr"] for row in read} == {0.1 + 0.2}


def test_what_is_not_finite_is_null(log, tmp_path):
    log.record(1, 1, {"loss": torch.tensor(math.nan), "grad_norm": torch.tensor(math.inf), "lr": -math.inf})
    (row,) = log.flush()
    assert (row["loss"], row["grad_norm"], row["lr"]) == (None, None, None)
    assert lines(tmp_path) == [row]


def test_a_value_overwritten_after_recording_is_not_lost_and_its_graph_is_not_kept(log):
    loss = torch.tensor(1.0, requires_grad=True)
    log.record(1, 1, {"loss": loss})
    assert not log._pending[0][2]["loss"].requires_grad
    with torch.no_grad():
        loss.fill_(9.0)
    assert log.flush()[0]["loss"] == 1.0


def test_steps_may_measure_different_things(log):
    log.record(1, 1, {"loss": torch.tensor(1.0)})
    log.record(2, 2, {"loss": torch.tensor(2.0), "validation": torch.tensor(3, dtype=torch.int64)})
    first, second = log.flush()
    assert "validation" not in first
    assert second["validation"] == 3


def test_speed_is_images_over_seconds_between_flushes(log, clock):
    log.start(samples_seen=80)
    for step in (11, 12):
        clock.now += 2.0
        log.record(step, 8 * step, {})
    assert [row["images_per_second"] for row in log.flush()] == [4.0, 4.0]
    clock.now += 1.0
    log.record(13, 104, {})
    assert [row["images_per_second"] for row in log.flush()] == [8.0]


def test_a_speed_that_was_never_timed_is_null_and_set_up_is_not_counted(log, clock, tmp_path):
    assert log.flush() == []
    assert list((tmp_path / "run").iterdir()) == []
    clock.now += 1000.0
    log.record(1, 8, {})
    assert log.flush()[0]["images_per_second"] is None
    clock.now += 2.0
    log.record(2, 16, {})
    assert log.flush()[0]["images_per_second"] == 4.0


def test_a_pause_is_not_counted(log, clock):
    with log.paused():
        clock.now += 5.0
    log.start(samples_seen=0)
    clock.now += 2.0
    log.record(1, 8, {})
    with log.paused():
        clock.now += 50.0
    assert log.flush()[0]["images_per_second"] == 4.0


def test_the_share_of_waiting_is_of_the_seconds_between_flushes(log, clock):
    log.start(0)
    for step in (1, 2):
        with log.waiting():
            clock.now += 0.5
        clock.now += 1.5
        log.record(step, 8 * step, {})
    assert [row["data_wait_share"] for row in log.flush()] == [0.25, 0.25]
    with log.waiting():
        clock.now += 1.0
    with log.paused():
        clock.now += 7.0
    log.record(3, 24, {})
    assert [row["data_wait_share"] for row in log.flush()] == [1.0]
    clock.now += 1.0
    log.record(4, 32, {})
    assert [row["data_wait_share"] for row in log.flush()] == [0.0]


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl", is_main=False)
    log.record(1, 1, {"loss": torch.tensor(1.0)})
    assert log.flush() == []
    assert not (tmp_path / "run").exists()


def test_a_value_with_a_shape_and_one_spread_over_ranks_are_defects(world, log):
    with pytest.raises(AssertionError, match=r"metric loss must be a plain \(\) tensor"):
        log.record(1, 1, {"loss": torch.zeros(1)})
    spread = distribute_tensor(torch.tensor(1.0), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(AssertionError, match=r"metric grad_norm must be a plain \(\) tensor, not .*DTensor"):
        log.record(1, 1, {"grad_norm": spread})


def test_a_file_that_cannot_be_written_is_a_run_error(tmp_path):
    (tmp_path / "file").write_text("")
    log = MetricsLog(tmp_path / "file" / "metrics.jsonl", is_main=True)
    log.record(1, 1, {})
    with pytest.raises(RunError, match=r"metrics\.jsonl could not be written.*Free space there; the same command"):
        log.flush()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_recording_does_not_wait_for_the_device(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_main=True)
    loss = torch.tensor(1.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        log.record(1, 8, {"loss": loss, "lr": 0.1})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert log.flush()[0]["loss"] == 1.5


def test_a_run_folder_that_was_removed_is_said_and_not_made_again(tmp_path, log):
    log.record(1, 8, {"loss": 1.0})
    log.flush()
    shutil.rmtree(tmp_path / "run")
    log.record(2, 16, {"loss": 1.0})
    with pytest.raises(RunError, match="run is gone: it was removed or moved while the run went on. Put it back"):
        log.flush()
    assert not (tmp_path / "run").exists()
