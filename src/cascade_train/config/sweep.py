"""The results of a sweep (`--multirun`): a line and a place in the ranking for each run, and one exit code for all.

With `hydra/launcher=slurm` each run is a job of its own, submitted by submitit; the process that was called waits for
all of them (sweeps/slurm.py). This file also checks that such jobs can be submitted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.error_messages import exit_code
from cascade_train.config.overrides import parses
from cascade_train.config.sweeps.naming import key_of, place_sweep
from cascade_train.config.sweeps.ranking import KINDS, Result, is_result, measured, metric_of, ranked, table
from cascade_train.config.sweeps.slurm import ON_SLURM, SlurmJob, adopt_slurm_step, requeue, slurm_jobs
from cascade_train.errors import STOPPED, ConfigError, RunError, install_hint, unwritten
from cascade_train.files.durable import to_yaml, write_durably
from cascade_train.files.untrusted import load_mapping, read_mapping
from cascade_train.redaction import redact_argument, redacted

LOOKING = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}
"""Flags with which nothing is run."""

OWN = {"call": str, "number": int}
"""What a run of a sweep adds to its result (`KINDS`), in the sweep's own folder."""

RESULTS, TABLE = "results.jsonl", "results.txt"

SAVED = "multirun.yaml"
"""What Hydra's sweepers write of a sweep, before the first run begins."""

SECONDS_FOR_A_SLOW_FOLDER = 15.0
"""A shared folder may show a file late that another machine wrote."""


def check_launcher(argv: Sequence[str]) -> None:
    """Refuse a sweep on SLURM where the plugin, sbatch or srun is missing, and a single run on it."""
    if ON_SLURM not in argv:
        return
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise ConfigError(f"{ON_SLURM} needs hydra-submitit-launcher. {install_hint('slurm')}.")
    if LOOKING & set(argv):
        return
    if not {"--multirun", "-m"} & set(argv):
        raise ConfigError(
            f"{ON_SLURM} submits the runs of a sweep. Add --multirun, or submit one run with sbatch/train.sbatch."
        )
    for command in ("sbatch", "srun"):  # submitit asks for the second before it calls the first
        if shutil.which(command) is None:
            raise ConfigError(
                f"{ON_SLURM} needs {command}, which is not on the PATH. Start the sweep where jobs are submitted from."
            )


@contextmanager
def leaving_no_results(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield a command line whose sweep leaves no folder, for commands that train nothing; others as they are."""
    if not {"--multirun", "-m"} & set(argv):
        yield list(argv)
        return
    with TemporaryDirectory() as folder:
        yield [*argv, f"hydra.sweep.dir={folder}", "~hydra.callbacks.sweep"]


class SweepResults(Callback):
    """Collects what the runs of a sweep came to; rank 0 of each run writes, the process that was called reads.

    The runs write one file each, since many may end at once, on machines that share a slow folder. The files stay, so
    that a later call of the sweep ranks the runs of this one, too.
    """

    def __init__(self) -> None:
        """Draw a name for this call, which its results carry."""
        self.call = secrets.token_hex(4)
        self.reported = False
        self.unwritten: list[Result] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Give the sweep its folder, and take away the summary of an earlier call."""
        self.reported = True  # where this fails, there is nothing to report
        HydraConfig.instance().set_config(config)  # else ${hydra:…} in hydra.sweep.dir has nothing to look at
        with ending_the_sweep():
            folder = place_sweep(config)
            if is_main():
                for name in (RESULTS, TABLE):
                    (folder / name).unlink(missing_ok=True)
                _show_changes(folder / SAVED, config)
        self.reported = False

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        """Take the place among the ranks that SLURM gave to this process."""
        with ending_the_sweep():
            adopt_slurm_step()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write what a run came to; end a sweep in this process with the first run that failed."""
        if config.hydra.mode != RunMode.MULTIRUN or job_return.status != JobStatus.COMPLETED:
            return
        with ending_the_sweep():
            self._end_run(config, job_return)

    def _end_run(self, config: DictConfig, job_return: JobReturn) -> None:
        code = int(job_return.return_value or 0)
        submitted = "SUBMITIT_EXECUTOR" in os.environ
        if is_main():
            if submitted and code == STOPPED and requeue():
                raise SystemExit(code)
            written = self._write(config, job_return, code)
            if submitted and not written:  # the process that waits learns of it from SLURM
                raise SystemExit(code or 1)
            code = code or int(not written)
        if code and not submitted:
            self._report(config)
            raise SystemExit(code)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show what the runs came to, and end with the exit code of the first that failed.

        Newer versions of Hydra call this after a failure, too: what has been shown stays, and the failure goes on.
        """
        with ending_the_sweep():
            code = self._report(config)
            if code and sys.exc_info()[0] is None:
                raise SystemExit(code)

    def _write(self, config: DictConfig, job: JobReturn, code: int) -> bool:
        """Write what a run came to, and return whether that worked; where it did not, it is kept for the table."""
        assert job.cfg is not None
        checkpoint = OmegaConf.select(job.cfg, "checkpoint") or {}
        best = checkpoint.get("best_metric")
        result = {
            "call": self.call,
            "number": config.hydra.job.num,
            "overrides": [redact_argument(override) for override in job.overrides or ()],
            "run_dir": str(job.cfg.run.dir),
            "exit_code": code,
            "best_metric": None if best is None else [best, str(checkpoint["best_mode"])],
            **measured(Path(job.cfg.run.dir) / "metrics.jsonl", best),
        }
        name = blake2b(result["run_dir"].encode(), digest_size=8).hexdigest()
        path = Path(config.hydra.sweep.dir) / ".results" / f"{name}.json"
        try:
            write_whole(path, json.dumps(result))
        except OSError as error:
            self.unwritten.append(result)
            sys.stderr.write(f"{unwritten(path, error)}.\n")
            return False
        return True

    def _report(self, config: DictConfig) -> int:
        """Write and show the results, once, and return the first exit code of this call that is not 0."""
        if not is_main() or self.reported:
            return 0
        self.reported = True
        folder = Path(config.hydra.sweep.dir)
        results = self._results(folder)
        if sys.exc_info()[0] is not None and all(each["earlier"] for each in results):
            return 0  # the sweep ends before its first run has
        name, mode = metric_of(results)
        lines = [json.dumps({**result, "ranked_by": name, "mode": mode}) + "\n" for result in ranked(results)]
        sys.stderr.write(table(results))
        own = sorted((each for each in results if not each["earlier"]), key=lambda each: each["number"])
        code = next((each["exit_code"] for each in own if each["exit_code"]), 0)
        path = folder / RESULTS
        try:
            write_whole(path, "".join(lines))
            write_whole(folder / TABLE, table(results))
        except OSError as error:
            sys.stderr.write(f"{len(results)} runs. {unwritten(path, error)}.\n")
            return code or 1
        sys.stderr.write(f"{len(results)} runs, in {path} and {TABLE}.\n")
        return code or int(bool(self.unwritten))

    def _results(self, folder: Path) -> list[Result]:
        """Return what is known of the runs of this call, and of earlier ones whose directories are still there."""
        end = time.monotonic() + SECONDS_FOR_A_SLOW_FOLDER
        while True:
            found = [read_mapping(path, **KINDS, **OWN) for path in (folder / ".results").glob("[!.]*.json")]
            found = [each for each in found if is_result(each) and OWN.keys() <= each.keys()]
            own = {each["number"] for each in found if each["call"] == self.call}
            lost = [job for job in slurm_jobs() if job.number not in own]
            if not any(job.state in ("", "COMPLETED") for job in lost) or time.monotonic() > end:
                break
            time.sleep(1)
        found += self.unwritten
        states = {job.number: job.state for job in slurm_jobs()}
        results = [self._public(each, states) for each in found] + [_lost(job) for job in lost]
        taken = {each["run_dir"] for each in results if not each["earlier"]}
        return [
            each
            for each in results
            if not each["earlier"] or (each["run_dir"] not in taken and Path(each["run_dir"]).is_dir())
        ]

    def _public(self, result: Result, states: Mapping[int, str]) -> Result:
        """Return a result without what only this file needs; with what SLURM says of a job that failed."""
        earlier = result["call"] != self.call
        state = None if earlier or not result["exit_code"] else states.get(result["number"])
        shown = {key: value for key, value in result.items() if key != "call"} | {"earlier": earlier}
        return shown | ({} if state in (None, "", "COMPLETED") else {"state": state})


def _show_changes(path: Path, config: DictConfig) -> None:
    """Show which single values differ from those saved of an earlier call, whose runs continue."""
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # an item would be interpolated
    assert isinstance(typed, list)
    before, now = (
        {key_of(override): redact_argument(override) for override in overrides if parses(override)}
        for overrides in (_saved_overrides(path), map(str, typed))
    )
    changed = [f"{before[key]} before, {now[key]} now" for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        sys.stderr.write(
            f"{path.parent} holds a sweep already, whose runs go on: {'; '.join(changed)}. What has ended is not "
            "trained again unless it is given more steps. Another run.name starts another sweep.\n"
        )


def _saved_overrides(path: Path) -> list[str]:
    try:
        saved = load_mapping(path)
        return [str(override) for override in saved["hydra"]["overrides"]["task"]]
    except (ValueError, LookupError, TypeError):
        return []


@contextmanager
def sweeps_saved_redacted() -> Iterator[None]:
    """Let rank 0 alone save the configuration of a sweep, with every secret in it hidden.

    Hydra's sweepers save it themselves, before they look at what the runs are given, so that a sweep that is refused
    leaves it too.
    """
    save: Callable[..., None] = OmegaConf.save

    def save_redacted(config: Any, f: Any, resolve: bool = False) -> None:
        if not isinstance(f, str | Path) or Path(f).name != SAVED:
            save(config, f, resolve)
        elif is_main():
            plain = redacted(OmegaConf.to_container(config, resolve=resolve, enum_to_str=True))
            write_whole(Path(f), to_yaml(plain, allow_unicode=True))

    OmegaConf.save = staticmethod(save_redacted)  # type: ignore[method-assign]
    try:
        yield
    finally:
        OmegaConf.save = staticmethod(save)  # type: ignore[method-assign]


@contextmanager
def ending_the_sweep() -> Iterator[None]:
    """Report what fails in a callback and end the sweep, unless another failure ends it: Hydra would only warn."""
    ending = sys.exc_info()[0] is not None
    try:
        yield
    except Exception as error:
        failure = RunError(f"The sweep ends here: {error}.") if isinstance(error, OSError) else error

        def fail() -> NoReturn:
            raise failure

        code = exit_code(fail)
        if not ending:
            raise SystemExit(code) from None


def _lost(job: SlurmJob) -> Result:
    """Return what is known of a job that was killed, or cancelled before it began."""
    directory = job.directory or Path("-")
    return {
        "number": job.number,
        "overrides": [redact_argument(override) for override in job.overrides],
        "run_dir": str(directory),
        "exit_code": 1,
        "state": job.state or "unknown to SLURM",
        "log": str(job.log),
        "best_metric": None,
        "earlier": False,
        **measured(directory / "metrics.jsonl", None),
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text, racing=True)


def is_main() -> bool:
    """Return whether this process is the one that writes."""
    return os.environ.get("RANK", "0") == "0"
