"""What a run was started with: versions, commit, command line and devices, for `environment.json`."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cascade_train.redaction import redact_argument

_PACKAGES = (
    "accelerate", "cascade-train", "diffusers", "hydra-core", "numpy", "omegaconf", "peft", "pillow", "safetensors",
    "torch", "torchvision", "transformers", "webdataset",
)  # fmt: skip
_GIT_SECONDS = 10


def describe_environment() -> dict[str, Any]:
    """Return time, versions, git commit of the code, command line and devices as JSON values.

    No environment variable is included, and secrets on the command line are hidden. A package that is not installed,
    and a commit where the code is not a checkout, are None.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {**{name: _version(name) for name in _PACKAGES}, "torch": torch.__version__},
        "git_commit": _git_commit(Path(__file__).resolve()),
        "command_line": [redact_argument(argument) for argument in sys.orig_argv],
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_commit(file: Path) -> str | None:
    """Return the commit of the checkout that tracks `file`, as it was first, with `+changes` if it is not clean."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
