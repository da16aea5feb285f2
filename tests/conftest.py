"""What every test stands on: one thread per process, the same arithmetic on every CPU, no network, fixed seeds."""

from __future__ import annotations

import os

# Before torch, tokenizers or the hub client are imported, here and in every process that a test starts.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MKL_CBWR": "COMPATIBLE",  # else sums round as the CPU's widest instructions make them
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
)

import atexit
import gc
import logging
import random
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.warm import quick

gc.disable()  # until all is collected: what tests import stays

for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:  # as a shell or nohup leaves it to what runs in the background
        signal.signal(_number, _handler)

ROOT = Path(__file__).resolve().parent.parent
SECONDS_OF_SLOW_TESTS = 1800

MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory: tests write checkpoints by the hundred, and each waits for its disk."""
GIB_OF_FILES = 4.0
"""Free there at least; all files of a whole suite are below 1."""


def _keep_files_in_memory() -> None:
    """Let tests, and what they start, have their temporary files in memory where there is room, unless told where."""
    if os.environ.keys() & {"PYTEST_DEBUG_TEMPROOT", "TMPDIR"} or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= GIB_OF_FILES * 2**30:
        folder = tempfile.mkdtemp(prefix="cascade_train_", dir=MEMORY)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # libraries leave files there, as torchrun does
        os.environ |= {"PYTEST_DEBUG_TEMPROOT": str(MEMORY), "TMPDIR": folder}


_keep_files_in_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make recipes` and `make gpu` ask for what `make test` leaves out."""
    parser.addoption("--recipes", action="store_true", help="run the tests that are marked recipes, and no others")
    parser.addoption("--gpu", action="store_true", help="run the tests that are marked gpu, and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not marked gpu: their numbers are those of a CPU, which ranks share."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu: torch sees no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, skip what this machine cannot run, and give slow tests their time."""
    asked = {True: [], False: []}
    kinds = ("recipes", "gpu")
    for item in items:
        is_asked = all((item.get_closest_marker(kind) is not None) == config.getoption(f"--{kind}") for kind in kinds)
        asked[is_asked].append(item)
    config.hook.pytest_deselected(items=asked[False])
    items[:] = asked[True]
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SECONDS_OF_SLOW_TESTS))
        if item.get_closest_marker("slurm") and shutil.which("sbatch") is None:
            item.add_marker(pytest.mark.skip(reason="needs SLURM (no sbatch on the PATH)"))


def pytest_collection_finish() -> None:
    """Collect garbage again, but seldom, and not among what was imported."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """Leave alone, too, what has stayed when a file of tests ends: a twelfth of all time was looking at it."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    """Let Python free all that it ends with."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(autouse=True)
def _log_of_no_command() -> None:
    """Forget the level at which a command that ran in this process shows its log, so that tests see all of theirs."""
    logging.getLogger("cascade_train").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def _composes_quickly() -> None:
    quick.compose_quickly()


@pytest.fixture(autouse=True, scope="module")
def _blank_charts(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules and request.path.stem != "test_loss_charts":
            quick.leave_charts_blank(patch.setattr)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Any:
    """Refuse connections that leave this machine, at once and by name, instead of hanging on them."""
    original = socket.socket.connect
    here = {"localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}

    def connect(self: socket.socket, address: Any) -> None:
        remote = self.family in (socket.AF_INET, socket.AF_INET6) and str(address[0]) not in here
        if remote and not str(address[0]).startswith("127."):
            raise RuntimeError(f"A test tried to reach {address[0]}: tests run without a network.")
        original(self, address)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", connect)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout under test."""
    return ROOT
