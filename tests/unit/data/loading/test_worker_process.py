"""A worker hears no signal that is for its run, and is gone when the run's process is."""

import gc
import multiprocessing
import os
import signal
import time

import pytest

from cascade_train.data.loading import worker_process


def wait_deaf(ready):
    worker_process.begin_worker(0)
    assert gc.get_freeze_count() > 0, "what the run made is not collected here"
    ready.set()
    time.sleep(60)


@pytest.fixture
def worker():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=wait_deaf, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    yield worker
    worker.kill()


def test_a_worker_survives_what_asks_its_run_to_stop_and_not_the_end_of_its_process(worker):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker.pid, number)
    worker.join(0.2)
    assert worker.is_alive()
    worker_process._kill_children()  # as at the exit of this process
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL


def test_the_end_is_registered_once(monkeypatch):
    registered = []
    monkeypatch.setattr(worker_process.atexit, "register", registered.append)
    worker_process.end_workers_with_this_process.cache_clear()
    worker_process.end_workers_with_this_process()
    worker_process.end_workers_with_this_process()
    assert registered == [worker_process._kill_children]
    worker_process.end_workers_with_this_process.cache_clear()
