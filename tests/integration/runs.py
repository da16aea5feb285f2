"""Small real runs through the entry point, and readers of what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.warm.programs import warm_programs

SMALL = (
    "model=c_tiny",
    "train.global_batch_size=8",
    "train.max_steps=4",
    "sample.every_steps=null",
    "checkpoint.every_steps=2",
)
NARROW = tuple(each for each in SMALL_NETWORK if each.startswith(("model.weights", "model.network")))
"""Of the smallest Stage C its network alone, untrained; encoders and sizes of pictures are those of c_tiny."""
TIMING = ("images_per_second", "data_wait_share")
"""Metrics that are read off a clock and differ between equal runs."""


def once(*overrides: str) -> list[str]:
    """Return overrides with the last one of each key alone."""
    return list({each.partition("=")[0]: each for each in overrides}.values())


def train(directory: Path, *overrides: str) -> Path:
    """Train a small run in this process, assert that it ended well, and return its directory."""
    code = launch(once(*SMALL, f"run.dir={directory}", *overrides))
    assert code == 0, f"exit code {code}"
    return directory


def torchrun(
    ranks: int, *arguments: str, cwd: Path, module: str = "cascade_train", warm: bool = False, **env: str
) -> Any:
    """Run a module under torchrun in a folder and return the completed process; warm: in forks of one Python."""
    python = str(warm_programs() / "python") if warm else sys.executable
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.run(
        [*command, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def cut_back(run: Path, copy: Path, step: int) -> Path:
    """Copy a run as it was on the disk when it was killed after the checkpoint of a step; return the copy."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(copy / "export")
    return copy


def read_metrics(directory: Path, *, first: int = 1) -> list[dict[str, Any]]:
    """Rows of a run's metrics from a step on, without values read off a clock; that of step 0 is validation alone."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= first]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def exported_weights(directory: Path) -> dict[str, Tensor]:
    """Return the exported network of a finetune run."""
    return load_file(directory / "export" / "prior" / "prior" / "diffusion_pytorch_model.safetensors")


def tensor_digests(folder: Path) -> dict[str, dict[str, str]]:
    """Return dtype, shape and digest of every tensor in the weight files below a folder, by file and name."""
    files = {path.relative_to(folder).as_posix(): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    return {
        file: {name: f"{value.dtype} {list(value.shape)} {_digest(value)}" for name, value in sorted(tensors.items())}
        for file, tensors in files.items()
    }


def _digest(value: Tensor) -> str:
    data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:12]
