"""What a sweep (`--multirun`) leaves beside its runs: one line per run, and one exit code for all.

With `hydra/launcher=slurm` each run is a job of its own, submitted by submitit; the process that was called waits for
all of them. This file also checks that such jobs can be submitted, and puts a stopped one back into the queue.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig

from cascade_train.config.slurm_step import adopt_slurm_step
from cascade_train.errors import STOPPED, ConfigError, RunError
from cascade_train.redaction import redact

ON_SLURM = "hydra/launcher=slurm"

LOOKING = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}
"""Flags with which nothing is run."""

SECONDS_OF_A_CALL = 60


def check_launcher(argv: Sequence[str]) -> None:
    """Refuse a sweep on SLURM where none can be submitted.

    Raises:
        ConfigError: the plugin or sbatch is missing, or it is no sweep.
    """
    if ON_SLURM not in argv:
        return
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise ConfigError(f'{ON_SLURM} needs hydra-submitit-launcher. Install it: pip install "cascade_train[slurm]"')
    if LOOKING & set(argv):
        return
    if not {"--multirun", "-m"} & set(argv):
        raise ConfigError(
            f"{ON_SLURM} submits the runs of a sweep. Add --multirun, or submit one run with sbatch/train.sbatch."
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"{ON_SLURM} needs sbatch, which is not on the PATH. Start the sweep where jobs are submitted from."
        )


@contextmanager
def lost_jobs_told() -> Iterator[None]:
    """Tell in words what submitit raises in the process that waits for the jobs of a sweep.

    Raises:
        RunError: a job was not submitted, or ended without a result.
    """
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        message = f"A job of the sweep was not submitted, or ended without a result; others are left alone. {error}"
        raise RunError(message) from error


class SweepResults(Callback):
    """Collects what the runs of a sweep came to; rank 0 of each run writes, the process that was called reads.

    The runs write one file each, since many may end at once, on machines that share a slow folder.
    """

    def __init__(self) -> None:
        """Draw a name for this sweep: others may share its folder."""
        self.name = secrets.token_hex(4)

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        """Take the place among the ranks that SLURM gave to this process."""
        adopt_slurm_step()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write what a run came to; end a sweep in this process with the first run that failed."""
        if config.hydra.mode != RunMode.MULTIRUN or job_return.status != JobStatus.COMPLETED:
            return
        code = int(job_return.return_value or 0)
        submitted = "SUBMITIT_EXECUTOR" in os.environ
        if is_main():
            if submitted and code == STOPPED and requeue():
                raise SystemExit(code)  # without a result, so that the waiting process waits on
            write_result(self._folder(config) / f"{config.hydra.job.num}.json", job_return, code)
        if code and not submitted:
            self._report(config)
            raise SystemExit(code)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Tell what the runs came to, and end with the exit code of the first that failed."""
        code = self._report(config)
        if code:
            raise SystemExit(code)

    def _folder(self, config: DictConfig) -> Path:
        return Path(config.hydra.sweep.dir) / ".results" / self.name

    def _report(self, config: DictConfig) -> int:
        """Join the results to one file, show them, and return the first exit code that is not 0."""
        if not is_main():
            return 0
        files = sorted(self._folder(config).glob("*.json"), key=lambda path: int(path.stem))
        results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        joined = Path(config.hydra.sweep.dir) / "results.jsonl"
        joined.write_text("".join(f"{json.dumps(result)}\n" for result in results), encoding="utf-8")
        sys.stderr.write("".join(f"{line(result)}\n" for result in results))
        sys.stderr.write(f"{len(results)} runs, in {joined}.\n")
        shutil.rmtree(self._folder(config), ignore_errors=True)
        return next((result["exit_code"] for result in results if result["exit_code"]), 0)


def write_result(path: Path, job: JobReturn, code: int) -> None:
    """Write the overrides, directory, exit code and last metrics of a run."""
    assert job.cfg is not None
    directory = Path(job.cfg.run.dir)
    result = {
        "overrides": [redact(override) for override in job.overrides or ()],
        "run_dir": str(directory),
        "exit_code": code,
        "metrics": last_metrics(directory / "metrics.jsonl"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")


def last_metrics(path: Path) -> dict[str, Any]:
    """Return the last line of a run's metrics; empty where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return last


def line(result: dict[str, Any]) -> str:
    """Return what a person wants to see of a run's result first."""
    metrics = result["metrics"]
    numbers = f"step {metrics['step']}, loss {metrics['loss']:.4f}" if "loss" in metrics else "no step"
    failed = f", exit code {result['exit_code']}" if result["exit_code"] else ""
    return f"{result['run_dir']}: {numbers}{failed}"


def is_main() -> bool:
    """Return whether this process is the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def requeue() -> bool:
    """Put the job of this process back into the queue and return whether that worked.

    A job that was cancelled is stopped by the same signal as one that was preempted, but is not RUNNING any more.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:  # a launcher of submitit's without a queue
        return False
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the number of one job of an array may be that of the array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    state = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    return state == "RUNNING" and _ask("scontrol", "requeue", job) is not None


def _ask(*command: str) -> str | None:
    """Return what a client of SLURM printed; None where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_OF_A_CALL, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
