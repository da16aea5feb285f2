"""SLURM: the rank of a process that srun started, and the jobs of a sweep: shown when submitted, waited for, requeued.

Results of runs are read by sweep.py: a job that was killed or preempted leaves none. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from cascade_train.config.sweeps.runs import folder_of_runs, sweep_name, swept_part
from cascade_train.errors import ConfigError, RunError
from cascade_train.redaction import redact_argument

ON_SLURM = "hydra/launcher=slurm"

SECONDS_OF_A_CALL = 60
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Bounds of the seconds between two calls of squeue, which are a tenth of the time waited."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""Final states; in all others SLURM may start the job again."""


@dataclass
class SlurmJob:
    """A run of a sweep as SLURM knows it."""

    number: int
    job: str  # SLURM's number, such as 17_0
    overrides: list[str]
    directory: Path | None  # None where only the run itself knows it
    log: Path
    state: str = ""  # as SLURM gave it last


JOBS: list[SlurmJob] = []
"""The jobs that this command has submitted."""


@contextmanager
def slurm_jobs_followed(argv: Sequence[str]) -> Iterator[None]:
    """Show submitit's jobs, and wait until SLURM has ended them; a RunError where one is not submitted."""
    JOBS.clear()
    if ON_SLURM not in argv:
        yield
        return
    slurm: Any = importlib.import_module("submitit.slurm.slurm")
    submit, results = slurm.SlurmExecutor._internal_process_submissions, slurm.SlurmJob.results
    slurm.SlurmExecutor._internal_process_submissions = _submitting(submit, argv)
    slurm.SlurmJob.results = lambda job: _wait()
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        raise RunError(f"The runs of the sweep were not submitted. {error}") from error
    finally:
        slurm.SlurmExecutor._internal_process_submissions = submit
        slurm.SlurmJob.results = results


def _submitting(submit: Callable[..., Any], argv: Sequence[str]) -> Callable[..., Any]:
    """Return submitit's function that submits Hydra's calls; it records and shows the jobs, too."""

    def submitted(executor: Any, calls: Sequence[Any]) -> Any:
        wait_for_earlier(Path(executor.folder).parent)
        jobs = submit(executor, calls)
        new = [_slurm_job(job, call, argv) for job, call in zip(jobs, calls, strict=True)]
        JOBS.extend(new)
        ids = ",".join(sorted({job.job.partition("_")[0] for job in new}))
        sys.stderr.write(
            f"Submitted {len(new)} runs as SLURM's job {ids}. Ctrl-C ends the waiting, not the jobs; scancel {ids} "
            "ends them.\n"
        )
        for job in new:
            where = job.directory or " ".join(map(redact_argument, job.overrides))
            log = job.log.relative_to(Path.cwd()) if job.log.is_relative_to(Path.cwd()) else job.log
            sys.stderr.write(f"  {job.job}  {where}  log: {log}\n")
        return jobs

    return submitted


def _slurm_job(job: Any, call: Any, argv: Sequence[str]) -> SlurmJob:
    overrides, number = [str(override) for override in call.args[0]], call.args[2]
    cfg = call.function.config
    folder = folder_of_runs(cfg, cfg.hydra.sweep.dir)
    directory = None if folder is None else folder / (swept_part(overrides, argv) or sweep_name(cfg))
    return SlurmJob(number, job.job_id, overrides, directory, Path(job.paths.stdout))


def _wait() -> list[JobReturn]:
    """Wait until SLURM holds none of the jobs, and return what Hydra expects; their results are in files."""
    states = {job.job: job.state for job in JOBS if job.state not in ENDED}
    try:
        wait_until_ended(states)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. SLURM goes on with the jobs {', '.join(states)}. The same command later waits for them, "
            "and shows what all runs came to."
        ) from None
    finally:
        for job in JOBS:
            job.state = states.get(job.job, job.state)
    ended = JobReturn(status=JobStatus.COMPLETED)
    ended.return_value = 0
    return [ended]


def wait_for_earlier(folder: Path) -> None:
    """Wait for the jobs of an earlier call of this sweep, by their folders: the run's lock would refuse two at once."""
    own = {job.job for job in JOBS}
    there = {path.name for path in folder.iterdir()} - own if folder.is_dir() else set()
    held = {job: state for job, state in (queue() or {}).items() if job in there and state not in ENDED}
    if held:
        sys.stderr.write(
            f"SLURM still holds {', '.join(held)} of an earlier call of this sweep: waiting for them to end.\n"
        )
        wait_until_ended(held)


def wait_until_ended(states: dict[str, str]) -> None:
    """Wait until SLURM holds none of some jobs, and record their states.

    A job that SLURM does not know, twice in a row, has ended; without an answer of SLURM, none has.
    """
    held, missed, begun = set(states), set[str](), time.monotonic()
    while held:
        found = queue()
        for job in sorted(held) if found is not None else ():
            state = (found or {}).get(job)
            states[job] = state or states[job]
            if state in ENDED or (state is None and job in missed):
                held.discard(job)
                sys.stderr.write(f"Job {job} has ended; {len(held)} of {len(states)} are left.\n")
            missed = missed | {job} if state is None else missed - {job}
        if held:
            time.sleep(min(LONGEST_PAUSE, max(FIRST_PAUSE, (time.monotonic() - begun) / 10)))


def queue() -> dict[str, str] | None:
    """Return the states of this user's jobs, recently ended ones included; None where SLURM does not answer."""
    text = ask("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i %T")
    return None if text is None else dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line.strip())


def requeue() -> bool:
    """Requeue the job of this process and return whether that worked.

    A cancelled job gets the same signal as a preempted one, but is not RUNNING any more. Nor is one that SLURM itself
    has requeued: the process that waits goes on waiting for it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:  # a launcher of submitit's without a queue
        return False
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the number of one job of an array may be that of the array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    state = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    return state == "RUNNING" and ask("scontrol", "requeue", job) is not None


def ask(*command: str) -> str | None:
    """Return the output of a client of SLURM; None where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_OF_A_CALL, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


FIRST_PORT, PORTS = 10000, 20000
"""MASTER_PORT follows from the job's number, below the ephemeral ports."""

RANKS, MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")


def adopt_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from SLURM's variables.

    Only in a step of several tasks without torchrun: a batch script and an interactive shell have SLURM_PROCID too, but
    no number of tasks of a step. MASTER_ADDR and MASTER_PORT stay where they are set. Raises as `check_rank_variables`.
    """
    for name in (*RANKS, *MEETING):  # compose files and Kubernetes set declared variables without a value to ""
        if value := environment.pop(name, "").strip():
            environment[name] = value
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "RANK" in environment:
        check_rank_variables(environment)
        return
    here = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["LOCAL_WORLD_SIZE"] = str(here)
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS))


def check_rank_variables(environment: MutableMapping[str, str]) -> None:
    """Refuse variables of ranks that describe no rank. Takes RANK away then, so that this process reports it."""
    remedy = (
        "torchrun sets them all, and srun's step of several tasks does too. To train in one process, unset RANK and "
        "WORLD_SIZE"
    )
    wanted, fault = ("RANK", "WORLD_SIZE", *MEETING), ""
    wrong = [name for name in (*RANKS, "MASTER_PORT") if not environment.get(name, "0").isdecimal()]
    rank, ranks = (0, 1) if wrong else (int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1)))
    missing = [name for name in wanted if name not in environment]
    is_alone = (rank, ranks) == (0, 1) and not {"RANK", "WORLD_SIZE"} <= environment.keys()
    if wrong:
        fault = f"{wrong[0]}={environment[wrong[0]]} must be a whole number"
    elif missing and not is_alone:
        given = " and ".join(f"{name}={environment[name]}" for name in wanted if name in environment)
        fault = f"{given} without {' and '.join(missing)}"
    elif not rank < ranks:
        fault = f"RANK={rank} must be less than WORLD_SIZE={ranks}"
    if fault:
        environment.pop("RANK", None)
        raise ConfigError(f"{fault}: {remedy}.")


def one_thread_a_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_NUM_THREADS to 1 for several ranks, as torchrun does, before torch or numpy is imported.

    Sums on a CPU differ in bits by the number of threads.
    """
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")


def first_host(nodes: str) -> str:
    """Return the first name of a list of nodes in SLURM's notation: `gpu[07-09,12],cpu1` begins with `gpu07`."""
    return re.sub(r"\[(\w+)[^]]*]", r"\1", nodes).partition(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Return how many tasks each node has, from SLURM's notation: `4(x2),1` is [4, 4, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]
