"""A Python that has imported the heavy libraries and lends itself: each command that it is asked for runs in a fork.

usage: server.py LISTENER FOLDER

A command sees its own arguments, folder, environment and files, as a process of its own does; only its imports are
done. What a command imports beside, later ones find imported too. The server ends when its standard input closes.

LISTENER is the number of an open socket, FOLDER holds the programs that ask; see programs.py.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import logging
import multiprocessing
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
import warnings
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

LASTING = ("site-packages", "dist-packages", "/lib/python3", "/src/cascade_train/")
"""Modules that lie below one of these are kept imported; those of a command's own folder are not."""
FIRST = ["cascade_train.assembly.run", "torch.distributed.run", "cascade_train.models.cascade.networks.response_norm"]
"""What trainings need; that of the networks brings what is heavy in diffusers and transformers."""


def keep_imported(names: list[str]) -> None:
    """Import modules here, so that later commands find them."""
    for name in names:
        if name not in sys.modules:
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)


SMALLEST = (
    *("task=finetune", "model=c_tiny", "model.weights=null", "model.image_size=32", "train.global_batch_size=2"),
    *("model.text_encoder.num_hidden_layers=1", "model.network.block_out_channels=[32,32]", "train.max_steps=1"),
    *("model.network.num_attention_heads=[1,1]", "model.network.down_num_layers_per_block=[1,1]"),
    *("model.network.up_num_layers_per_block=[1,1]", "sample.every_steps=null"),
)


def train_once(folder: Path) -> None:
    """Train a step, plain and sharded, so that commands find ready what begins slowly: half of what a start costs.

    Nothing else of it is left: no thread, no handler of the log, no state of random numbers.
    """
    import torch

    from cascade_train.__main__ import launch
    from cascade_train.distributed import parallelize

    if torch.cuda.is_available():
        return  # a device that this process has used is lost to forks
    before = torch.get_rng_state()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()) as said:
        warnings.simplefilter("ignore")
        for name, kept in (("plain", parallelize.is_whole), ("sharded", lambda *_: False)):
            with patch.object(parallelize, "is_whole", kept):
                assert launch([*SMALLEST, f"run.dir={folder / name}"]) == 0, said.getvalue()
            shutil.rmtree(folder / name)
    torch.set_rng_state(before)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as engine/checkpoint, undone with the block
    logging.captureWarnings(False)
    logging.getLogger().handlers.clear()
    logging.getLogger("cascade_train").setLevel(logging.NOTSET)
    gc.disable()
    assert threading.active_count() == 1


def worth_keeping(before: set[str]) -> list[str]:
    """Return the names of modules that are new in this process and belong to a library, installed or this one."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in sys.modules.keys() - before}
    return [name for name, file in files.items() if any(part in file for part in LASTING)]


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and the three open files that came with it."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(size, "big"))), files


def become(request: dict[str, Any], files: list[int], stand_in: str) -> None:
    """Take a command's files, folder, environment and arguments for this process's own."""
    for wanted, given in enumerate(files):
        os.dup2(given, wanted)
        os.close(given)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    multiprocessing.set_executable(sys.executable)
    sys.executable = stand_in  # torchrun starts its ranks by it


def execute(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    how, *rest = arguments[1:] if arguments[0] == "-u" else arguments
    main = sys.modules["__main__"].__dict__
    if how == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        for name in (rest[0], f"{rest[0]}.__main__"):
            if name not in ("cascade_train", "torch.distributed.run"):
                sys.modules.pop(name, None)  # runpy warns of a module that is there before it runs
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how in ("-", "-c"):
        sys.argv = [how, *rest[how == "-c" :]]
        sys.path.insert(0, "")
        exec(compile(sys.stdin.read() if how == "-" else rest[0], "<string>", "exec"), main)
    else:
        sys.argv = [how, *rest]
        sys.path.insert(0, str(Path(how).parent))
        runpy.run_path(how, run_name="__main__")


def end_of(arguments: list[str]) -> int:
    """Do what `python ARGUMENTS` does, to the end of its threads and exit handlers, and return its exit code."""
    code = 0
    try:
        execute(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF  # without the teardown of modules, which would copy all of the server's memory


def watch(command: int, connection: socket.socket) -> None:
    """Tell the one who asked how a command ends, or end the command when he is gone."""
    ended = os.pidfd_open(command)
    connection.sendall(f"{command}\n".encode())
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with suppress(OSError):
        connection.sendall(f"{code}\n".encode())


def serve(connection: socket.socket, folder: Path) -> None:
    """Run one command in a fork of this process, which watches it and ends."""
    request, files = receive(connection)
    command = os.fork()
    if command:
        for given in files:
            os.close(given)
        watch(command, connection)
        os._exit(0)
    connection.close()
    gc.enable()
    before = set(sys.modules)
    become(request, files, str(folder / "python"))
    code = end_of(request["arguments"])
    (folder / f"{os.getpid()}.imported").write_text("\n".join(worth_keeping(before)))
    os._exit(code)


def take_leave() -> None:
    """Forget the commands that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Import, listen, and serve commands, each beside the others."""
    listener, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else a look at the devices spoils them for forks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as a start of its own sets it: torch reads it once
    gc.disable()  # here; what is imported stays
    gc.set_threshold(10_000, 20, 50)  # in commands: most end before there is much
    keep_imported(FIRST)
    quicken = runpy.run_path(str(Path(__file__).with_name("quick.py")))
    for each in ("compose_quickly", "leave_charts_blank"):
        quicken[each]()
    train_once(folder)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        take_leave()
        for file in folder.glob("*.imported"):
            keep_imported(file.read_text().split())
            file.unlink()
        gc.freeze()  # what is here now is not looked at in forks, so that they share its memory
        if os.fork() == 0:
            listener.close()
            serve(connection, folder)
        connection.close()
    gc.unfreeze()
    shutil.rmtree(folder)
    folder.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
