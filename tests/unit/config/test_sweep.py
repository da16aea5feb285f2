import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

from cascade_train.config import sweep
from cascade_train.config.launch import compose_and_run
from cascade_train.config.sweep import SweepResults, check_launcher
from cascade_train.config.sweeps import slurm as slurm_jobs
from cascade_train.config.sweeps.runs import measured, swept_part
from cascade_train.config.sweeps.slurm import SlurmJob
from cascade_train.errors import STOPPED, ConfigError
from tests.unit.config.test_error_messages import raise_

ON_SLURM = ["hydra/launcher=slurm", "--multirun"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "SUBMITIT_EXECUTOR", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def config(folder: Path, number: int = 0, mode: RunMode = RunMode.MULTIRUN):
    return OmegaConf.create({"hydra": {"mode": mode, "job": {"num": number}, "sweep": {"dir": str(folder)}}})


def ended(folder: Path, number: int, code: int = 0, best: str | None = None, **metrics: float) -> JobReturn:
    """Return a run that ended, with one line of metrics in its directory."""
    directory = folder / f"run{number}"
    directory.mkdir()
    if metrics:
        (directory / "metrics.jsonl").write_text(json.dumps({"step": 7, **metrics}) + "\n{torn")
    checkpoint = {"best_metric": best, "best_mode": "max"}
    cfg = OmegaConf.create({"run": {"dir": str(directory)}, "checkpoint": checkpoint})
    job = JobReturn(overrides=[f"run.seed={number}"], cfg=cfg)
    job.status, job.return_value = JobStatus.COMPLETED, code
    return job


def end(results: SweepResults, folder: Path, number: int, code: int = 0, **values: float | str) -> None:
    results.on_job_end(config(folder, number), ended(folder, number, code, **values))


def run_as_newer_hydra(results: SweepResults, folder: Path, run: Callable[[], None]) -> None:
    """Run a sweep, and end it after a failure, too."""
    try:
        run()
    finally:
        results.on_multirun_end(config(folder))


@pytest.fixture
def submitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Runs are jobs of submitit's; undone by its `undo`."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    return monkeypatch


def read(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_results_are_a_table_and_one_line_each_with_the_best_first(folder: Path, capsys: pytest.CaptureFixture[str]):
    results = SweepResults()
    for number in (10, 2):
        end(results, folder, number, loss=number / 8)
    results.on_multirun_end(config(folder))
    assert [row["overrides"] for row in read(folder)] == [["run.seed=2"], ["run.seed=10"]]
    assert read(folder)[0] == {
        "number": 2,
        "overrides": ["run.seed=2"],
        "run_dir": str(folder / "run2"),
        "exit_code": 0,
        "best_metric": None,
        "metrics": {"step": 7, "loss": 0.25},
        "values": {"loss": 0.25},
        "earlier": False,
        "ranked_by": "loss",
        "mode": "min",
    }
    table = (
        "Runs by loss, the mean of its last 100 steps; the smallest is the best:\n"
        "          loss     step  run\n"
        f"          0.25        7  {folder / 'run2'}\n"
        f"          1.25        7  {folder / 'run10'}\n"
    )
    assert (folder / "results.txt").read_text() == table
    assert capsys.readouterr().err == f"{table}2 runs, in {folder / 'results.jsonl'} and results.txt.\n"


@pytest.mark.parametrize(
    ("best", "metrics", "order", "by"),
    [
        (None, "validate/loss", [1, 2, 0], "validate/loss, as last measured; the smallest"),
        ("psnr", "psnr", [2, 1, 0], "psnr, as last measured; the largest"),
        ("loss", "other", [0, 1, 2], "loss, the mean of its last 100 steps; the largest"),
    ],
    ids=["validation", "chosen", "the loss, chosen"],
)
def test_runs_are_ranked_by_the_validation_metric_or_the_chosen_one(
    folder: Path, capsys: pytest.CaptureFixture[str], best: str | None, metrics: str, order: list[int], by: str
):
    results = SweepResults()
    for number, value in enumerate([{"loss": 0.9}, {"loss": 0.8, metrics: 0.3}, {"loss": 0.7, metrics: 0.4}]):
        end(results, folder, number, best=best, **value)
    results.on_multirun_end(config(folder))
    assert [row["number"] for row in read(folder)] == order
    assert capsys.readouterr().err.startswith(f"Runs by {by} is the best:\n")


def test_the_last_steps_of_a_loss_are_averaged_and_torn_lines_left_out(tmp_path: Path):
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in range(1, 301)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 301, "loss": null}', '{"step": 3', "[1]"]))
    found = measured(tmp_path / "metrics.jsonl", None)
    assert found["values"] == {"loss": pytest.approx(sum(range(202, 301)) / 99)}
    assert found["metrics"] == {"step": 301, "loss": None}


def test_a_run_that_failed_here_ends_the_sweep(folder: Path, capsys: pytest.CaptureFixture[str]):
    results = SweepResults()
    end(results, folder, 0, loss=0.5)
    with pytest.raises(SystemExit, match="1"):
        end(results, folder, 1, code=1, loss=0.1)
    assert f"           0.1        7  {folder / 'run1'}  (exit code 1)\n" in capsys.readouterr().err
    assert [row["exit_code"] for row in read(folder)] == [0, 1]


def test_a_failure_goes_on_where_hydra_ends_the_sweep_after_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    first, second = SweepResults(), SweepResults()
    stopped = ended(folder, 0, code=75, loss=0.5)
    with pytest.raises(SystemExit, match="75"):
        run_as_newer_hydra(first, folder, lambda: first.on_job_end(config(folder), stopped))
    assert [row["exit_code"] for row in read(folder)] == [75]
    assert capsys.readouterr().err.count("Runs by loss") == 1
    end(second, folder, 1, loss=0.5)
    with pytest.raises(KeyboardInterrupt):
        run_as_newer_hydra(second, folder, partial(raise_, KeyboardInterrupt()))
    assert [(row["number"], row["earlier"]) for row in read(folder)] == [(1, False), (0, True)]


def test_a_job_that_failed_elsewhere_leaves_the_others_alone(folder: Path, submitted: pytest.MonkeyPatch):
    results = SweepResults()
    for number, code in enumerate((0, 2, 1)):
        end(results, folder, number, code)
    submitted.undo()
    with pytest.raises(SystemExit, match="2"):
        results.on_multirun_end(config(folder))
    assert {row["number"]: row["exit_code"] for row in read(folder)} == {0: 0, 1: 2, 2: 1}


def job_of(folder: Path, number: int, state: str) -> SlurmJob:
    return SlurmJob(
        number, f"17_{number}", [f"run.seed={number}"], folder / f"run{number}", folder / f"{number}.out", state
    )


def test_a_job_that_left_nothing_is_named(
    folder: Path, submitted: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    results = SweepResults()
    end(results, folder, 0, loss=0.5)
    end(results, folder, 2, STOPPED)
    submitted.undo()
    ended(folder, 1, loss=0.25)
    jobs = [job_of(folder, *each) for each in enumerate(("COMPLETED", "CANCELLED", "FAILED"))]
    submitted.setattr(sweep, "JOBS", jobs)
    with pytest.raises(SystemExit, match="1"):
        results.on_multirun_end(config(folder))
    assert [(row["number"], row["exit_code"], row.get("state")) for row in read(folder)] == [
        (0, 0, None),
        (1, 1, "CANCELLED"),
        (2, STOPPED, "FAILED"),
    ]
    shown = f"          0.25        7  {folder / 'run1'}  (exit code 1, CANCELLED, log {folder / '1.out'})\n"
    assert shown in capsys.readouterr().err


def test_a_result_that_a_slow_folder_shows_late_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "JOBS", [job_of(folder, 0, "COMPLETED")])
    results, late = SweepResults(), ended(folder, 0, loss=0.5)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: results._write(config(folder, 0), late, 0))
    results.on_multirun_end(config(folder))
    assert [row["exit_code"] for row in read(folder)] == [0]


def test_a_result_that_cannot_be_written_ends_the_sweep(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / ".results").touch()
    with pytest.raises(SystemExit, match="1"):
        end(SweepResults(), folder, 0, loss=0.5)
    assert [(row["number"], row["exit_code"]) for row in read(folder)] == [(0, 0)]
    said = capsys.readouterr().err
    assert ".json could not be written: " in said
    assert said.endswith(f"1 runs, in {folder / 'results.jsonl'} and results.txt.\n")


def test_the_code_of_a_run_is_kept_where_its_result_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / ".results").touch()
    with pytest.raises(SystemExit, match="2"):
        end(SweepResults(), folder, 0, code=2)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(SystemExit, match="1"):
        end(SweepResults(), folder, 1)


@pytest.mark.parametrize("code", [0, 3])
def test_a_summary_that_cannot_be_written_ends_in_a_failure(
    folder: Path, submitted: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
):
    results = SweepResults()
    (folder / "results.jsonl").mkdir()
    end(results, folder, 0, code, loss=0.5)
    submitted.undo()
    with pytest.raises(SystemExit, match=str(code or 1)):
        results.on_multirun_end(config(folder))
    said = capsys.readouterr().err
    assert f"           0.5        7  {folder / 'run0'}" in said
    assert "results.jsonl could not be written: " in said


def test_a_defect_ends_the_sweep_and_does_not_hide_why_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sweep, "table", lambda _: raise_(IndexError("a defect")))
    results, second = SweepResults(), SweepResults()
    end(results, folder, 0, loss=0.5)
    with pytest.raises(SystemExit, match="1"):
        results.on_multirun_end(config(folder))
    end(second, folder, 1, loss=0.5)
    with pytest.raises(ValueError, match="the cause"):
        run_as_newer_hydra(second, folder, partial(raise_, ValueError("the cause")))
    assert capsys.readouterr().err.count("IndexError: a defect") == 4


def test_only_rank_zero_writes(folder: Path, submitted: pytest.MonkeyPatch):
    submitted.setenv("RANK", "1")
    results = SweepResults()
    for number, code in enumerate((0, STOPPED)):
        end(results, folder, number, code)
    results.on_multirun_end(config(folder))
    assert not (folder / ".results").exists()
    assert not (folder / "results.jsonl").exists()


def test_a_single_run_leaves_nothing(folder: Path):
    SweepResults().on_job_end(config(folder, mode=RunMode.RUN), ended(folder, 0, code=1))
    assert not (folder / ".results").exists()


@pytest.mark.parametrize(
    ("state", "requeued", "calls"),
    [("RUNNING", "", 2), ("COMPLETING", "", 1), (None, "", 1), ("RUNNING", None, 2)],
    ids=["preempted", "cancelled", "no answer", "not requeued"],
)
def test_a_stopped_job_goes_back_to_the_queue(
    folder: Path, submitted: pytest.MonkeyPatch, state: str | None, requeued: str | None, calls: int
):
    asked, answers = [], {"squeue": state, "scontrol": requeued}
    submitted.setattr(slurm_jobs, "ask", lambda *command: asked.append(command[:2]) or answers[command[0]])
    submitted.setenv("SLURM_JOB_ID", "17")
    works = (state, requeued) == ("RUNNING", "")
    with pytest.raises(SystemExit, match=str(STOPPED)) if works else nullcontext():
        end(SweepResults(), folder, 0, STOPPED)
    assert asked == [("squeue", "--noheader"), ("scontrol", "requeue")][:calls]
    assert (folder / ".results").exists() is not works


def test_one_job_of_an_array_is_requeued_alone(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(slurm_jobs, "ask", lambda *command: asked.append(command) or "RUNNING")
    for name, value in {"JOB_ID": "17", "ARRAY_JOB_ID": "17", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert slurm_jobs.requeue()
    assert asked == [("squeue", "--noheader", "--jobs=17_3", "--format=%T"), ("scontrol", "requeue", "17_3")]


def test_without_a_queue_a_stopped_run_is_a_result(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    end(SweepResults(), folder, 0, STOPPED)
    assert len(list((folder / ".results").glob("*.json"))) == 1


def test_client_that_fails_or_is_missing_answers_nothing(monkeypatch: pytest.MonkeyPatch):
    assert slurm_jobs.ask("echo", "17") == "17"
    assert slurm_jobs.ask("false") is None
    assert slurm_jobs.ask("no-such-program-anywhere") is None


def test_a_sweep_on_slurm_needs_its_plugin_and_its_commands(monkeypatch: pytest.MonkeyPatch):
    for there in ([], ["sbatch"]):
        monkeypatch.setattr(shutil, "which", lambda name, there=there: name if name in there else None)
        with pytest.raises(ConfigError, match=f"needs {'srun' if there else 'sbatch'}, which is not on the PATH"):
            check_launcher(ON_SLURM)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --editable '\.\[slurm\]'"):
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


SECRET = "SECRETSECRET12345"
PIPED = ("model=c_tiny", "task=finetune", "data=webdataset")
URLS = rf'data.urls=["pipe:curl -H \"X-Api-Key: {SECRET}\" https://h/a.tar"]'


def holding(secret: str, folder: Path) -> list[str]:
    """Return the files in which a secret stands."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in files if secret.encode() in path.read_bytes())


@pytest.mark.parametrize("swept", ["optimizer.lr=1e-4,1e-3", "optimizer.none=1,2"])
def test_a_sweep_keeps_no_secret(start: Callable[..., tuple[int, str]], tmp_path: Path, swept: str):
    code, said = start("--multirun", *PIPED, URLS, swept)
    assert code == (0 if "1e-4" in swept else 2), said
    saved = tmp_path / "multirun" / "finetune-c_tiny" / "multirun.yaml"
    assert "pipe:curl <redacted> https://h/a.tar" in saved.read_text()
    assert OmegaConf.load(saved).hydra.mode == "MULTIRUN"
    assert (holding(SECRET, tmp_path), SECRET in said) == ([], False)


def test_only_the_tars_of_a_command_are_compared_with_an_earlier_call(start: Callable[..., tuple[int, str]]):
    sweep_of = ("--multirun", *PIPED, "optimizer.lr=1e-4,1e-3")
    assert start(*sweep_of, URLS)[0] == 0
    said = start(*sweep_of, URLS.replace(SECRET, "ANOTHER123456789"))[1]
    assert "before," not in said
    said = start(*sweep_of, URLS.replace("a.tar", "b.tar"))[1]
    assert "https://h/a.tar" in said.partition(" before, ")[0]
    assert "https://h/b.tar" in said.partition(" before, ")[2].partition(" now")[0]
    assert SECRET not in said


def test_a_sweep_on_slurm_keeps_a_secret_in_its_pickles_alone(
    start: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = {"sbatch": "Submitted batch job 17", "squeue": "17_0 FAILED\n17_1 FAILED", "srun": "", "sinfo": ""}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    own = "run.dir=out/${run.name}"  # runs are told by their overrides
    code, said = start("--multirun", ON_SLURM[0], *PIPED, URLS, own, "run.seed=1,2", train=len)
    assert code == 1, said
    assert "Submitted 2 runs as SLURM's job 17" in said
    assert SECRET not in said
    held = holding(SECRET, tmp_path)
    assert held
    assert {path.split("/")[2] for path in held} == {".submitit"}
    assert {Path(path).suffix for path in held} == {".pkl"}


@pytest.mark.parametrize("damaged", ["a: [", "[]", "hydra: 1", "\udcff"])
def test_what_is_damaged_of_an_earlier_call_keeps_no_summary(
    start: Callable[..., tuple[int, str]], tmp_path: Path, damaged: str
):
    folder = tmp_path / "multirun" / "finetune-c_tiny"
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_bytes(damaged.encode(errors="surrogateescape"))
    (folder / "results.jsonl").touch()
    code, said = start("--multirun", *PIPED[:2], "optimizer.none=1,2")
    assert (code, "UserWarning" in said) == (2, False), said
    assert not (folder / "results.jsonl").exists()


def test_a_folder_that_cannot_be_used_ends_the_sweep_in_words(start: Callable[..., tuple[int, str]], tmp_path: Path):
    (tmp_path / "there" / "results.jsonl").mkdir(parents=True)
    code, said = start("--multirun", *PIPED[:2], "hydra.sweep.dir=there", "run.seed=1,2")
    assert code == 1
    assert said.startswith("The sweep ends here: ")
    assert "results.jsonl" in said
    assert said.count("\n") == 1


def test_a_key_that_is_given_twice_is_named_where_its_last_values_are_several():
    argv = ["--multirun", "optimizer.lr=1", "optimizer.lr=2,3", "task.rank=4,8"]
    assert swept_part(["optimizer.lr=1", "optimizer.lr=3", "task.rank=4"], argv) == "lr=3,rank=4"
    assert swept_part(["optimizer.lr=2", "optimizer.lr=1", "task.rank=4"], [*argv, "optimizer.lr=1"]) == "rank=4"


@pytest.mark.parametrize("deletion", ["~ema.decay", "~ema.decay=null"])
def test_a_key_that_is_deleted_is_no_value_of_a_run(deletion: str):
    swept = ["--multirun", deletion, "optimizer.lr=1,2"]
    assert swept_part([deletion, "optimizer.lr=1"], swept) == "lr=1"
    assert swept_part(["~ema.decay=null", "optimizer.lr=1"], swept) == "lr=1"
    assert swept_part([deletion], ["--multirun", deletion]) == "no-decay"
