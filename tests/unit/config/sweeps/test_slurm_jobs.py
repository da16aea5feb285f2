from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from submitit.core.utils import FailedSubmissionError
from submitit.slurm import slurm

from cascade_train.config.sweeps import slurm as slurm_jobs
from cascade_train.config.sweeps.slurm import ON_SLURM, slurm_jobs_followed, wait_for_earlier, wait_until_ended
from cascade_train.errors import RunError

ARGV = [ON_SLURM, "--multirun", "optimizer.lr=1,2", "task=lora"]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return what squeue says when it is asked, one answer after the other; the last one for ever."""
    answers: list[str | None] = []
    monkeypatch.setattr(slurm_jobs, "ask", lambda *command: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(slurm_jobs.time, "sleep", lambda seconds: None)
    return answers


def test_a_job_is_waited_for_while_slurm_holds_it(queue: list[str | None], capsys: pytest.CaptureFixture[str]):
    queue += [
        "17_0 RUNNING\n17_1 PENDING\n9 FAILED",
        "17_0 COMPLETING\n17_1 RUNNING",  # preempted: it starts again
        None,  # no answer says nothing
        "17_0 PENDING\n17_1 CANCELLED",
        "17_0 RUNNING",
        "",
        "17_0 RUNNING",
        "",
        "",
    ]
    states = {"17_0": "", "17_1": ""}
    wait_until_ended(states)
    assert states == {"17_0": "RUNNING", "17_1": "CANCELLED"}
    assert capsys.readouterr().err == "Job 17_1 has ended; 1 of 2 are left.\nJob 17_0 has ended; 0 of 2 are left.\n"
    assert queue == [""]


def test_jobs_of_an_earlier_call_are_waited_for_first(
    queue: list[str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "16_0").mkdir()
    (tmp_path / "16_1").mkdir()
    queue += ["16_0 RUNNING\n16_1 COMPLETED\n9 RUNNING", "16_0 RUNNING", "16_0 COMPLETED"]
    wait_for_earlier(tmp_path)
    assert capsys.readouterr().err.startswith("SLURM still holds 16_0 of an earlier call of this sweep: waiting")
    wait_for_earlier(tmp_path / "missing")
    assert queue == ["16_0 COMPLETED"]


def submit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit two runs as Hydra's launcher does, where sbatch only gives a number."""
    cfg = OmegaConf.create({"run": {"name": "a", "dir": "runs/${run.name}"}, "hydra": {"sweep": {"dir": "multirun/a"}}})
    calls = [
        SimpleNamespace(function=SimpleNamespace(config=cfg), args=([f"optimizer.lr={lr}", "task=lora"], "", number))
        for number, lr in enumerate((1, 2))
    ]
    monkeypatch.setattr(slurm.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    executor = slurm.SlurmExecutor(folder / ".submitit" / "%j")
    jobs = executor._internal_process_submissions(calls)
    assert [job.results()[0].return_value for job in jobs] == [0, 0]


def test_what_was_submitted_is_told_at_once(
    queue: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    queue += ["", "17_0 COMPLETED\n17_1 FAILED"]
    made = [slurm.SlurmJob(tmp_path / ".submitit" / "%j", f"17_{n}") for n in (0, 1)]
    monkeypatch.setattr(slurm.SlurmExecutor, "_internal_process_submissions", lambda self, calls: made)
    before = slurm.SlurmJob.results
    with slurm_jobs_followed(ARGV):
        submit(tmp_path, monkeypatch)
        assert [(job.number, job.state) for job in slurm_jobs.JOBS] == [(0, "COMPLETED"), (1, "FAILED")]
    assert slurm.SlurmJob.results is before
    assert capsys.readouterr().err.splitlines()[:3] == [
        "Submitted 2 runs as SLURM's job 17. Ctrl-C ends the waiting, not the jobs; scancel 17 ends them.",
        "  17_0  multirun/a/lr=1  log: .submitit/17_0/17_0_0_log.out",
        "  17_1  multirun/a/lr=2  log: .submitit/17_1/17_1_0_log.out",
    ]


def test_an_interrupt_says_what_becomes_of_the_jobs(
    queue: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    queue += ["", "17_0 RUNNING"]
    made = [slurm.SlurmJob(tmp_path / "%j", f"17_{n}") for n in (0, 1)]
    monkeypatch.setattr(slurm.SlurmExecutor, "_internal_process_submissions", lambda self, calls: made)
    monkeypatch.setattr(slurm_jobs.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt, match="goes on with the jobs 17_0, 17_1"), slurm_jobs_followed(ARGV):
        submit(tmp_path, monkeypatch)


def test_a_sweep_that_was_not_submitted_is_told_in_words():
    with (
        pytest.raises(RunError, match=r"The runs of the sweep were not submitted. no such"),
        slurm_jobs_followed(ARGV),
    ):
        raise FailedSubmissionError("no such partition")
    with pytest.raises(RuntimeError, match="something else"), slurm_jobs_followed(ARGV):
        raise RuntimeError("something else")
