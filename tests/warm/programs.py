"""`python`, `torchrun` and `cascade-train` with the heavy libraries imported, for tests that start many of them."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def warm_programs() -> Path:
    """Return a folder of programs that run in forks of a server, which ends with the processes that asked for it.

    They behave as those of the set-up do. What a test must not share (a start measured, a process killed by its
    number) starts `sys.executable` instead. The workers of one call of pytest share the server.
    """
    if not hasattr(os, "pidfd_open"):
        return Path(sys.executable).parent
    call = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of_{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"warm_{call}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            start_server(folder)
    keep = os.open(folder / "asked_for", os.O_WRONLY | os.O_NONBLOCK)  # an error where the server has died
    atexit.register(os.close, keep)
    return folder


def start_server(folder: Path) -> None:
    """Make the folder of programs, and start their server, which ends once no process has `asked_for` open."""
    folder.mkdir()
    os.mkfifo(folder / "asked_for")
    where = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(where))
    listener.listen(64)
    python = shlex.join([sys.executable, "-IS", str(HERE / "client.py"), str(where), sys.executable])
    modules = {"python": "", "torchrun": "-m torch.distributed.run ", "cascade-train": "-m cascade_train "}
    for name, before in modules.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {python} {before}"$@"\n')
        program.chmod(0o755)
    start = [sys.executable, "-P", str(HERE / "server.py"), str(listener.fileno()), str(folder)]
    asked = os.open(folder / "asked_for", os.O_RDONLY | os.O_NONBLOCK)
    server = subprocess.Popen(start, stdin=asked, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()])
    os.close(asked)
    listener.close()
    atexit.register(server.wait)  # after the last of the workers has closed what it asked by
