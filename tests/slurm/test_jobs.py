"""Jobs on a real SLURM, which these tests start and stop: two virtual nodes on this machine.

Ranks are processes of SLURM's; those that import much do it once, in a Python that all are forks of (tests/warm).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.integration.runs import read_metrics
from tests.slurm.cluster import Cluster, missing, wait_for
from tests.slurm.test_script import SCRIPT
from tests.warm.programs import warm_programs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAINING = (
    *SMALL_NETWORK,
    "task=finetune",
    "train.global_batch_size=4",
    "log.every_steps=1",
    "sample.every_steps=null",
)
STEPS = 12
RANKS = ["--nodes=2", "--ntasks-per-node=2"]
ENVIRONMENT = """
export PATH="{python}:$PATH"
export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
"""
"""What sbatch/env.sh is for: the Python, and how ranks find each other where names of nodes do not resolve."""

FIRST_START_IS_SLOW = """
import os, sys, time
from cascade_train.__main__ import launch
from cascade_train.engine.loop import Trainer

train_step = Trainer.train_step

def slow(self, micro_batches):
    time.sleep(2 if self.step >= 2 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0)
    return train_step(self, micro_batches)

Trainer.train_step = slow
sys.exit(launch(sys.argv[3:]))
"""
"""What stands for `python -m cascade_train` where a preemption has to meet the job after its second step."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder that jobs are submitted from, with what they source first."""
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "env.sh").write_text(ENVIRONMENT.format(python=warm_programs()))
    return tmp_path


def stand_in(folder: Path, program: str) -> None:
    """Let jobs of a folder run a shell script in place of Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\n{program}\n")
    python.chmod(0o755)
    (folder / "sbatch" / "env.sh").write_text(ENVIRONMENT.format(python=folder))


def submit(cluster: Cluster, folder: Path, *options: str, overrides: tuple[str, ...] = (), **environment: str) -> str:
    return cluster.submit("--output=job.out", *options, str(SCRIPT), *overrides, cwd=folder, **environment)


def said(folder: Path) -> str:
    output = folder / "job.out"
    return output.read_text() if output.exists() else ""


def undisturbed(folder: Path, overrides: tuple[str, ...]) -> Path:
    """Train on four ranks without SLURM and return the run's directory."""
    jobs = [{"ranks": 4, "argv": [*overrides, f"run.dir={folder / 'alone'}"], "hook": None, "out": str(folder / "out")}]
    (folder / "runs.json").write_text(json.dumps(jobs))
    forked = Path(__file__).resolve().parents[1] / "distributed" / "forked.py"
    command = [str(warm_programs() / "python"), str(forked), "runs.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(done.stdout) == [[0, 0, 0, 0]], (folder / "out" / "said_0").read_text()
    return folder / "alone"


@pytest.mark.distributed
def test_preempted_job_continues_and_ends_as_if_undisturbed(cluster: Cluster, folder: Path):
    overrides = (*TRAINING, "checkpoint.every_steps=5", f"train.max_steps={STEPS}")
    (folder / "slow.py").write_text(FIRST_START_IS_SLOW)
    stand_in(folder, f'exec {shlex.quote(str(warm_programs() / "python"))} slow.py "$@"')
    job = submit(cluster, folder, "--partition=low", *RANKS, overrides=(*overrides, "run.dir=run"))
    wait_for(lambda: "\nstep 2/" in said(folder) or cluster.state(job) == "FAILED", seconds=600)
    assert cluster.state(job) == "RUNNING", said(folder)
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    wait_for(lambda: cluster.state(job) in ("PENDING", "COMPLETED", "FAILED"), seconds=300)
    assert cluster.state(job) == "PENDING", said(folder)
    saved = [int(path.name.partition("_")[2]) for path in (folder / "run" / "checkpoints").glob("step_*")]
    assert 2 <= max(saved) < STEPS
    assert "requeued; the same command continues" in said(folder)
    wait_for(lambda: cluster.state(other) == "COMPLETED")
    cluster.start_requeued(job)
    wait_for(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), seconds=600)
    assert cluster.state(job) == "COMPLETED", said(folder)
    assert cluster.facts(job)["Restarts"] == "1"
    assert f"Continuing at step {max(saved)} " in said(folder)
    assert json.loads((folder / "run" / "environment.json").read_text())["ranks"] == 4
    assert read_metrics(folder / "run") == read_metrics(undisturbed(folder, overrides))


@pytest.mark.distributed
def test_each_run_of_a_sweep_is_a_job_of_several_ranks(cluster: Cluster, folder: Path):
    sweep = ["--multirun", "hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2", "optimizer.lr=1e-3,1e-4,-1"]
    done = subprocess.run(
        [str(warm_programs() / "python"), "-m", "cascade_train", *sweep, *TRAINING, "run.name=a", "train.max_steps=1"],
        cwd=folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    results = [json.loads(line) for line in (folder / "multirun" / "a" / "results.jsonl").read_text().splitlines()]
    results.sort(key=lambda row: row["number"])
    assert [row["exit_code"] for row in results] == [0, 0, 2]
    assert [row["metrics"]["lr"] for row in results[:2]] == [1e-3, 1e-4]
    runs = [folder / row["run_dir"] for row in results]
    assert [json.loads((run / "environment.json").read_text())["ranks"] for run in runs[:2]] == [2, 2]
    assert [run.relative_to(folder).as_posix() for run in runs] == [f"multirun/a/lr={lr}" for lr in (0.001, 0.0001, -1)]
    assert not runs[2].exists()
    assert f"{results[1]['values']['loss']:.6g}        1  multirun/a/lr=0.0001\n" in done.stderr
    assert (folder / "multirun" / "a" / "results.txt").read_text() in done.stderr
    assert "_2  multirun/a/lr=-1  log: multirun/a/.submitit/" in done.stderr


SWEEP = "multirun/lora-c_tiny"


def array_of(folder: Path) -> str:
    """Return the number of the array that a sweep of two runs has submitted."""
    wait_for(lambda: len(list(folder.glob(f"{SWEEP}/.submitit/*_1/*submitted.pkl"))) == 1)
    return next(folder.glob(f"{SWEEP}/.submitit/*_1")).name.partition("_")[0]


STOPS_ONCE = """
import os, sys
from cascade_train.config.launch import compose_and_run

def train(cfg):
    return 75 if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0

sys.exit(compose_and_run(sys.argv[1:], train))
"""
"""A sweep whose runs are stopped in their first start, without the cost of training."""


def test_stopped_runs_of_a_sweep_continue_while_it_waits(cluster: Cluster, folder: Path):
    sweep = ["--multirun", "hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2", "run.seed=1,2"]
    command = [str(warm_programs() / "python"), "-c", STOPS_ONCE, *sweep, "task=lora", "model=c_tiny"]
    waiting = subprocess.Popen(command, cwd=folder, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    array = array_of(folder)
    for number in (0, 1):
        wait_for(lambda job=f"{array}_{number}": cluster.facts(job)["Restarts"] == "1")
        cluster.start_requeued(f"{array}_{number}")
    _, errors = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, errors
    results = [json.loads(line) for line in (folder / SWEEP / "results.jsonl").read_text().splitlines()]
    assert {row["overrides"][0]: row["exit_code"] for row in results} == {"run.seed=1": 0, "run.seed=2": 0}


SAVES_WHEN_ASKED = """
import json, os, signal, sys, time
from pathlib import Path
from cascade_train.config.launch import compose_and_run

def train(cfg):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    Path(cfg.run.dir).mkdir(parents=True, exist_ok=True)
    rows = [{"step": 30 if again else 15, "loss": 1.0 if again else 2.0}]
    (Path(cfg.run.dir) / "metrics.jsonl").write_text(json.dumps(rows[0]) + chr(10))
    while not (stopped or again):
        time.sleep(0.2)
        if cfg.run.seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return 75 if stopped else 0

sys.exit(compose_and_run(sys.argv[1:], train))
"""
"""A sweep whose runs train until they are stopped, and end at once where they are started again; one is killed."""


def test_a_sweep_waits_for_what_was_preempted_and_names_what_was_killed(cluster: Cluster, folder: Path):
    """In a partition without a grace time SLURM has requeued a job before its ranks have saved."""
    (folder / SWEEP).mkdir(parents=True)
    (folder / SWEEP / "results.jsonl").write_text("of an earlier sweep")
    options = ["hydra.launcher.partition=abrupt", "hydra.launcher.cpus_per_task=4"]
    sweep = ["--multirun", "hydra/launcher=slurm", *options, "run.seed=1,2", "task=lora", "model=c_tiny"]
    command = [str(warm_programs() / "python"), "-c", SAVES_WHEN_ASKED, *sweep]
    waiting = subprocess.Popen(command, cwd=folder, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    array = array_of(folder)
    for number in (1, 2):
        wait_for(lambda number=number: (folder / SWEEP / f"seed={number}" / "metrics.jsonl").exists())
    assert not (folder / SWEEP / "results.jsonl").exists()
    wait_for(lambda: cluster.state(f"{array}_1") == "FAILED")
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    wait_for(lambda: cluster.facts(f"{array}_0")["Restarts"] == "1")
    assert waiting.poll() is None
    wait_for(lambda: cluster.state(other) == "COMPLETED")
    cluster.start_requeued(f"{array}_0")
    _, errors = waiting.communicate(timeout=300)
    assert waiting.returncode == 1, errors
    results = [json.loads(line) for line in (folder / SWEEP / "results.jsonl").read_text().splitlines()]
    assert [(row["run_dir"], row["metrics"]["step"], row["exit_code"], row.get("state")) for row in results] == [
        (f"{SWEEP}/seed=1", 30, 0, None),
        (f"{SWEEP}/seed=2", 15, 1, "FAILED"),
    ]
    assert f"{SWEEP}/seed=2  (exit code 1, FAILED, log " in errors


def test_refused_job_is_not_requeued(cluster: Cluster, folder: Path):
    job = submit(cluster, folder, *RANKS, overrides=("model=c_tiny", "task=lora", "train.max_steps=0"))
    wait_for(lambda: cluster.state(job) == "FAILED")
    assert cluster.facts(job)["ExitCode"] == "2:0"
    assert said(folder).count("train.max_steps=0 must be 1 or more.") == 1


@pytest.mark.parametrize("options", [["--gpus-per-node=2"], ["--ntasks-per-node=2", "--gpus-per-task=1"]])
def test_ranks_see_the_gpus_of_their_job_and_no_others(cluster: Cluster, folder: Path, options: list[str]):
    stand_in(folder, 'echo "rank $SLURM_PROCID, $SLURM_LOCALID of $CUDA_VISIBLE_DEVICES"')
    job = submit(cluster, folder, "--nodes=2", *options)
    wait_for(lambda: cluster.state(job) == "COMPLETED")
    expected = [f"rank {rank}, {rank % 2} of 0,1" for rank in range(4)]
    assert sorted(line for line in said(folder).splitlines() if line.startswith("rank")) == expected


def test_nodes_with_different_numbers_of_gpus_have_a_rank_for_each(cluster: Cluster, folder: Path):
    stand_in(folder, 'echo "rank $SLURM_PROCID, $SLURM_LOCALID of $CUDA_VISIBLE_DEVICES, $SLURM_STEP_TASKS_PER_NODE"')
    job = submit(cluster, folder, "--nodes=2", "--gpus=3")
    wait_for(lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    ranks = sorted(line for line in said(folder).splitlines() if line.startswith("rank"))
    expected = ["rank 0, 0 of 0,1, 2,1", "rank 1, 1 of 0,1, 2,1", "rank 2, 0 of 0, 2,1"]
    other = ["rank 0, 0 of 0, 1,2", "rank 1, 0 of 0,1, 1,2", "rank 2, 1 of 0,1, 1,2"]
    assert ranks in (expected, other), said(folder)


def test_job_preempted_while_it_starts_is_requeued(cluster: Cluster, folder: Path):
    (folder / "sbatch" / "env.sh").write_text(ENVIRONMENT.format(python=Path(sys.executable).parent))
    job = submit(cluster, folder, "--partition=low", *RANKS, overrides=(*TRAINING, "run.dir=run"))
    wait_for(lambda: "srun" in said(folder))
    cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    wait_for(lambda: cluster.state(job) in ("PENDING", "COMPLETED", "FAILED"), seconds=300)
    state, restarts = cluster.state(job), cluster.facts(job)["Restarts"]
    cluster.call("scancel", job)
    assert (state, restarts) == ("PENDING", "1"), said(folder)
    assert "requeued; the same command continues" in said(folder)
    assert not list(folder.glob("run/checkpoints/step_*")), "it had started"


def test_job_preempted_before_a_node_has_started_its_ranks_is_requeued(cluster: Cluster, folder: Path):
    """Those do not hear of it, and are killed when the others have ended."""
    deaf = 'if [ "$SLURM_NODEID" = 1 ]; then trap "" TERM; else trap "exit 75" TERM; fi'
    stand_in(folder, f"{deaf}; echo began; while true; do sleep 0.2; done")
    job = submit(cluster, folder, "--partition=low", *RANKS, SRUN_OPTIONS="--wait=5")
    wait_for(lambda: said(folder).count("began") == 4)
    cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    wait_for(lambda: cluster.state(job) in ("PENDING", "COMPLETED", "FAILED"), seconds=300)
    state, restarts = cluster.state(job), cluster.facts(job)["Restarts"]
    cluster.call("scancel", job)
    assert (state, restarts) == ("PENDING", "1"), said(folder)
    by_whom = ("requeued; the same command continues", "DUE TO JOB REQUEUE")  # the script, or SLURM while it asked
    assert any(words in said(folder) for words in by_whom), said(folder)


def test_job_after_a_refused_one_ends_where_it_is_told_to(cluster: Cluster, folder: Path):
    stand_in(folder, "exit 2")
    job = submit(cluster, folder)
    waiting = ["--dependency=afterok:" + job, "--kill-on-invalid-dep=yes", "--wrap=true"]
    after = cluster.submit(*waiting, cwd=folder)
    wait_for(lambda: cluster.state(job) == "FAILED")
    wait_for(lambda: cluster.state(after) == "CANCELLED")
    assert cluster.facts(after)["Restarts"] == "0"


def test_cancelled_job_is_not_requeued(cluster: Cluster, folder: Path):
    stand_in(folder, "trap 'exit 75' TERM; echo began; while true; do sleep 0.2; done")
    job = submit(cluster, folder)
    wait_for(lambda: "began" in said(folder))
    cluster.call("scancel", job)
    wait_for(lambda: "so it is not requeued" in said(folder))
    wait_for(lambda: cluster.state(job) == "CANCELLED")
    assert cluster.facts(job)["Restarts"] == "0"


def test_job_out_of_time_is_requeued_though_its_ranks_still_start(cluster: Cluster, folder: Path):
    stand_in(folder, '[ "$SLURM_RESTART_COUNT" = 1 ] && exit; echo "began $*"; while true; do sleep 0.2; done')
    array = submit(cluster, folder, "--array=0-1", overrides=("run.name=a {b}, c",))
    wait_for(lambda: said(folder).count("began -m cascade_train run.name=a {b}, c\n") == 2)
    jobs = [f"{array}_0", f"{array}_1"]
    (namesake,) = (job for job in jobs if cluster.facts(job)["JobId"] == array)  # whose number means the array, too
    (other,) = set(jobs) - {namesake}
    cluster.call("scancel", "--batch", "--signal=USR1", namesake)  # as SLURM does it 120 s before the limit
    cluster.start_requeued(namesake)
    wait_for(lambda: cluster.state(namesake) == "COMPLETED")
    assert (cluster.state(other), cluster.facts(other)["Restarts"]) == ("RUNNING", "0")
    cluster.call("scancel", array)
