"""What sbatch/train.sbatch decides, on any machine: stand-ins for the programs of SLURM note how they were called."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import wait_for

SCRIPT = Path(__file__).resolve().parents[2] / "sbatch" / "train.sbatch"
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
STAND_INS = {
    "srun": 'printf "%s\\n" "$@" > srun.called; $DURING_STEP\nexit "$STEP_EXITS"',
    "squeue": 'echo "${STATE:-RUNNING}"',
    "scontrol": 'echo "$*" >> scontrol.called; echo "$SHOWS"; exit "${SCONTROL_EXITS:-0}"',
    "sleep": "exec /bin/sleep 0.1",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder that a job is submitted from, with the stand-ins in `bin`."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    return tmp_path


def begin(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "CASCADE"))}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env={**kept, **JOB, "PATH": path, "STEP_EXITS": "0", "DURING_STEP": "", "SHOWS": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run the script as a job and return its exit code and what it said."""
    script = begin(folder, *arguments, **environment)
    said, _ = script.communicate(timeout=120)
    return script.returncode, said


def requeues(folder: Path) -> int:
    called = folder / "scontrol.called"
    return called.read_text().count("requeue 17\n") if called.exists() else 0


@pytest.mark.parametrize(
    ("environment", "count", "said"),
    [
        ({"STEP_EXITS": "0"}, 0, ""),
        ({"STEP_EXITS": "2"}, 0, ""),
        ({"STEP_EXITS": "1"}, 0, "failed with exit code 1"),
        ({"STEP_EXITS": "130"}, 0, "failed with exit code 130"),
        ({"STEP_EXITS": "75"}, 1, "requeued; the same command continues"),
        ({"STEP_EXITS": "143"}, 1, "requeued; the same command continues"),
        ({"STEP_EXITS": "138"}, 1, "requeued; the same command continues"),
        ({"STEP_EXITS": "140"}, 1, "requeued; the same command continues"),
        ({"STEP_EXITS": "137"}, 0, "failed with exit code 137"),
        ({"STEP_EXITS": "75", "STATE": "COMPLETING"}, 0, "the job is COMPLETING, so it is not requeued"),
        ({"STEP_EXITS": "143", "STATE": "CANCELLED"}, 0, "the job is CANCELLED, so it is not requeued"),
        ({"STEP_EXITS": "75", "SCONTROL_EXITS": "1"}, 1, "SLURM does not requeue this job"),
    ],
    ids=[
        *("ended", "refused", "crashed", "interrupted", "stopped", "TERM before Python", "USR1 before Python"),
        *("USR2 before Python", "killed", "cancelled", "cancelled before Python", "requeue refused"),
    ],
)
def test_only_a_stopped_run_goes_back_to_the_queue(folder: Path, environment: dict[str, str], count: int, said: str):
    code, text = run(folder, **environment)
    assert code == int(environment["STEP_EXITS"])
    assert said in text
    assert requeues(folder) == count


@pytest.mark.parametrize(
    ("preempted", "count"),
    [("None", 0), ("2026-11-26T10:02:16", 0), ("2026-11-26T10:02:17", 1), ("2026-11-26T10:02:18", 1)],
    ids=["never", "before this start", "in the second of its start", "later"],
)
def test_a_killed_run_goes_back_to_the_queue_if_this_start_was_preempted(folder: Path, preempted: str, count: int):
    shows = f"   StartTime=2026-11-26T10:02:17 EndTime=Unknown\n   PreemptTime={preempted} SuspendTime=None"
    assert run(folder, STEP_EXITS="137", SHOWS=shows)[0] == 137
    assert requeues(folder) == count


def test_one_job_of_an_array_is_requeued_alone(folder: Path):
    run(folder, STEP_EXITS="75", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")
    assert (folder / "scontrol.called").read_text() == "requeue 17_3\n"


def test_a_crash_is_retried_as_often_as_allowed(folder: Path):
    for attempt in (1, 2):
        code, said = run(folder, STEP_EXITS="1", CASCADE_CRASH_RETRIES="2")
        assert (code, requeues(folder)) == (1, attempt)
        assert f"retry {attempt} of 2 after exit code 1" in said
    run(folder, STEP_EXITS="75", CASCADE_CRASH_RETRIES="2")  # being stopped is no crash
    assert requeues(folder) == 3
    assert "failed with exit code 1" in run(folder, STEP_EXITS="1", CASCADE_CRASH_RETRIES="2")[1]
    assert requeues(folder) == 3
    assert not list(folder.glob(".cascade_crashes*"))


LISTENS = "trap 'asked=1' USR1; touch began; while [ -z \"${asked:-}\" ]; do sleep; done"
STARTS = "touch began; while true; do sleep; done"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("step", "code"), [(LISTENS, 75), (STARTS, 128 + signal.SIGUSR1)], ids=["listens", "starts"])
def test_request_to_stop_reaches_the_ranks(folder: Path, step: str, code: int, number: signal.Signals):
    (folder / "step.sh").write_text(step)
    script = begin(folder, DURING_STEP=". ./step.sh", STEP_EXITS="75")
    wait_for((folder / "began").exists)
    script.send_signal(number)
    said, _ = script.communicate(timeout=120)
    assert script.returncode == code, said
    assert requeues(folder) == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_request_to_stop_before_the_ranks_start_requeues_without_starting_them(folder: Path, number: signal.Signals):
    (folder / "sbatch").mkdir()
    (folder / "sbatch" / "env.sh").write_text("touch sourcing; /bin/sleep 1")
    script = begin(folder)
    wait_for((folder / "sourcing").exists)
    script.send_signal(number)
    said, _ = script.communicate(timeout=120)
    assert (script.returncode, requeues(folder)) == (75, 1), said
    assert not (folder / "srun.called").exists()


def test_overrides_reach_the_ranks_as_they_were_written(folder: Path):
    overrides = ['sample.prompts=["a {red}, large circle","b  c"]', "data.urls=a-{0..3}.tar", "run.name=x y*", ""]
    assert run(folder, *overrides)[0] == 0
    called = (folder / "srun.called").read_text().split("\n")[:-1]
    assert called[called.index("cascade_train") + 1 :] == overrides


@pytest.mark.parametrize(
    ("allocation", "layout"),
    [
        ({}, []),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "4"}, []),
        ({"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "6"}, ["--cpus-per-task=6"]),
        (
            {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96"},
            ["--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12"],
        ),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "2"}, ["--ntasks=8", "--ntasks-per-node=4", "--overcommit"]),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, []),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "4"}, []),
    ],
    ids=[
        "one rank a node",
        "as asked",
        "with cores",
        "a rank a GPU",
        "few cores",
        "one for all GPUs",
        "two for all GPUs",
    ],
)
def test_there_is_a_rank_for_each_gpu(folder: Path, allocation: dict[str, str], layout: list[str]):
    assert run(folder, **allocation)[0] == 0
    called = (folder / "srun.called").read_text().split()
    assert called[2 : called.index("python")] == layout


def test_what_the_cluster_needs_is_sourced_first(folder: Path):
    (folder / "sbatch").mkdir()
    (folder / "sbatch" / "env.sh").write_text("export STEP_EXITS=2\n")
    assert run(folder)[0] == 2
    (folder / "other.sh").write_text("return 3\n")
    code, said = run(folder, CASCADE_ENV="./other.sh")
    assert code == 1
    assert "./other.sh failed" in said
    code, said = run(folder, CASCADE_ENV="./missing.sh")
    assert code == 1
    assert f"CASCADE_ENV=./missing.sh is not there, seen from {folder}" in said


def test_options_for_srun_come_from_the_environment(folder: Path):
    (folder / "sbatch").mkdir()
    (folder / "sbatch" / "env.sh").write_text("SRUN_OPTIONS='--container-image=a.sqsh  --mpi=none\n--x=*'\n")
    assert run(folder, "task=lora", SLURM_NTASKS_PER_NODE="1", SLURM_CPUS_PER_TASK="6")[0] == 0
    called = (folder / "srun.called").read_text().split()
    options = ["--cpus-per-task=6", "--container-image=a.sqsh", "--mpi=none", "--x=*"]
    assert called[2 : called.index("python")] == options
    assert called[called.index("python") :] == ["python", "-m", "cascade_train", "task=lora"]


def test_the_example_of_an_environment_is_valid(folder: Path):
    example = SCRIPT.with_name("env.example.sh")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("activated=1\n")
    (folder / "all.sh").write_text(example.read_text().replace("# export ", "export "))
    for file in (example, folder / "all.sh"):
        command = ["bash", "-euc", f". {file}; echo $activated"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout == "1\n"
