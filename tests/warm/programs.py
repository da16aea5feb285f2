"""`python`, `torchrun` and `cascade-train` with the heavy libraries imported, for tests that start many of them."""

from __future__ import annotations

import atexit
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
    """Return a folder of programs that run in forks of a server, which ends with this process.

    They behave as those of the set-up do. What a test must not share (a start measured, a process killed by its
    number) starts `sys.executable` instead.
    """
    if not hasattr(os, "pidfd_open"):
        return Path(sys.executable).parent
    folder = Path(tempfile.mkdtemp(prefix="warm_"))
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
    server = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()])
    listener.close()
    atexit.register(server.communicate)
    return folder
