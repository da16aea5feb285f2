import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from submitit.core.utils import FailedSubmissionError

from cascade_train.config import sweep
from cascade_train.config.launch import compose_and_run
from cascade_train.config.sweep import SweepResults, check_launcher, lost_jobs_told
from cascade_train.errors import STOPPED, ConfigError, RunError

ON_SLURM = ["hydra/launcher=slurm", "--multirun"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "SUBMITIT_EXECUTOR", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def config(folder: Path, number: int = 0, mode: RunMode = RunMode.MULTIRUN):
    return OmegaConf.create({"hydra": {"mode": mode, "job": {"num": number}, "sweep": {"dir": str(folder)}}})


def ended(folder: Path, number: int, code: int = 0, loss: float | None = None) -> JobReturn:
    """Return a run that ended, with one line of metrics in its directory."""
    directory = folder / f"run{number}"
    directory.mkdir()
    if loss is not None:
        (directory / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": loss}) + "\n")
    job = JobReturn(overrides=[f"run.seed={number}"], cfg=OmegaConf.create({"run": {"dir": str(directory)}}))
    job.status, job.return_value = JobStatus.COMPLETED, code
    return job


def read(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_results_are_one_file_and_one_line_each(folder: Path, capsys: pytest.CaptureFixture[str]):
    results = SweepResults()
    for number in (10, 2):
        results.on_job_end(config(folder, number), ended(folder, number, loss=number / 8))
    results.on_multirun_end(config(folder))
    assert [row["overrides"] for row in read(folder)] == [["run.seed=2"], ["run.seed=10"]]
    assert read(folder)[0] == {
        "overrides": ["run.seed=2"],
        "run_dir": str(folder / "run2"),
        "exit_code": 0,
        "metrics": {"step": 7, "loss": 0.25},
    }
    said = capsys.readouterr().err
    assert said.startswith(f"{folder / 'run2'}: step 7, loss 0.2500\n")
    assert said.endswith(f"2 runs, in {folder / 'results.jsonl'}.\n")
    assert not list((folder / ".results").iterdir())


def test_a_run_that_failed_here_ends_the_sweep(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="1"):
        SweepResults().on_job_end(config(folder), ended(folder, 0, code=1))
    assert capsys.readouterr().err.startswith(f"{folder / 'run0'}: no step, exit code 1\n")


def test_a_job_that_failed_elsewhere_leaves_the_others_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    results = SweepResults()
    with monkeypatch.context() as job:
        job.setenv("SUBMITIT_EXECUTOR", "slurm")
        for number, code in enumerate((0, 2, 1)):
            results.on_job_end(config(folder, number), ended(folder, number, code))
    with pytest.raises(SystemExit, match="2"):
        results.on_multirun_end(config(folder))
    assert [row["exit_code"] for row in read(folder)] == [0, 2, 1]


def test_only_rank_zero_writes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    results = SweepResults()
    for number, code in enumerate((0, STOPPED)):
        results.on_job_end(config(folder, number), ended(folder, number, code))
    results.on_multirun_end(config(folder))
    assert not (folder / ".results").exists()
    assert not (folder / "results.jsonl").exists()


def test_a_single_run_leaves_nothing(folder: Path):
    SweepResults().on_job_end(config(folder, mode=RunMode.RUN), ended(folder, 0, code=1))
    assert not (folder / ".results").exists()


class Slurm:
    """Answers like squeue and scontrol, and notes what it was asked."""

    def __init__(self, state: str | None, *, requeues: bool = True) -> None:
        self.answers = {"squeue": state, "scontrol": "" if requeues else None}
        self.asked: list[str] = []

    def __call__(self, *command: str) -> str | None:
        self.asked.append(" ".join(command[:2]))
        return self.answers[command[0]]


@pytest.mark.parametrize(
    ("slurm", "asked"),
    [
        (Slurm("RUNNING"), ["squeue --noheader", "scontrol requeue"]),
        (Slurm("COMPLETING"), ["squeue --noheader"]),
        (Slurm(None), ["squeue --noheader"]),
        (Slurm("RUNNING", requeues=False), ["squeue --noheader", "scontrol requeue"]),
    ],
    ids=["preempted", "cancelled", "no answer", "not requeued"],
)
def test_a_stopped_job_goes_back_to_the_queue(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slurm: Slurm, asked: list[str]
):
    monkeypatch.setattr(sweep, "_ask", slurm)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    works = slurm.answers == Slurm("RUNNING").answers
    if works:
        with pytest.raises(SystemExit, match=str(STOPPED)):
            SweepResults().on_job_end(config(folder), ended(folder, 0, STOPPED))
    else:
        SweepResults().on_job_end(config(folder), ended(folder, 0, STOPPED))
    assert slurm.asked == asked
    assert (folder / ".results").exists() is not works


def test_one_job_of_an_array_is_requeued_alone(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(sweep, "_ask", lambda *command: asked.append(command) or "RUNNING")
    for name, value in {"JOB_ID": "17", "ARRAY_JOB_ID": "17", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert sweep.requeue()
    assert asked == [("squeue", "--noheader", "--jobs=17_3", "--format=%T"), ("scontrol", "requeue", "17_3")]


def test_without_a_queue_a_stopped_run_is_a_result(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    SweepResults().on_job_end(config(folder), ended(folder, 0, STOPPED))
    assert len(list((folder / ".results").rglob("0.json"))) == 1


def test_client_that_fails_or_is_missing_answers_nothing(monkeypatch: pytest.MonkeyPatch):
    assert sweep._ask("echo", "17") == "17"
    assert sweep._ask("false") is None
    assert sweep._ask("no-such-program-anywhere") is None


def test_a_sweep_on_slurm_needs_its_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "cascade_train\[slurm\]"'):
        check_launcher(ON_SLURM)


def test_a_sweep_on_slurm_needs_sbatch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs sbatch, which is not on the PATH"):
        check_launcher(ON_SLURM)


def test_a_single_run_is_no_sweep_on_slurm():
    with pytest.raises(ConfigError, match="Add --multirun, or submit one run with sbatch/train.sbatch"):
        check_launcher(ON_SLURM[:1])
    check_launcher(["--multirun", "task=lora"])


def test_launcher_can_be_looked_at_where_no_job_can_be_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    argv = ["--cfg", "hydra", "--package", "hydra.launcher", "hydra/launcher=slurm", "task=lora", "model=c_tiny"]
    assert compose_and_run(argv, lambda cfg: 1) == 0
    said = capsys.readouterr().out
    assert "max_num_timeout: 1000\n" in said
    assert "SlurmLauncher\n" in said


def test_a_job_that_is_lost_is_told_in_words():
    told = "was not submitted, or ended without a result; others are left alone. no such"
    with pytest.raises(RunError, match=told), lost_jobs_told():
        raise FailedSubmissionError("no such partition")
    with pytest.raises(RuntimeError, match="something else"), lost_jobs_told():
        raise RuntimeError("something else")
