"""The results of a sweep (`--multirun`): a ranked line for each run, and one exit code for all.

With `hydra/launcher=slurm` each run is a job of submitit's (sweeps/slurm.py); this file checks for its commands.
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
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.error_messages import code_of
from cascade_train.config.overrides import parses
from cascade_train.config.sweeps.runs import (
    RESULTS,
    Result,
    ended_runs,
    key_of,
    measured,
    metric_of,
    place_sweep,
    ranked,
    table,
)
from cascade_train.config.sweeps.slurm import JOBS, ON_SLURM, SlurmJob, adopt_slurm_step, requeue
from cascade_train.errors import STOPPED, ConfigError, RunError, install_hint, unwritten
from cascade_train.files.durable import to_yaml, write_durably
from cascade_train.files.untrusted import load_mapping
from cascade_train.redaction import redact_argument, redacted

MULTIRUN = {"--multirun", "-m"}
LOOKING = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}
"""Flags with which nothing is run."""
TABLE = "results.txt"
SAVED = "multirun.yaml"
"""Hydra's sweepers write it before the first run begins."""
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
    if not MULTIRUN & set(argv):
        raise ConfigError(
            f"{ON_SLURM} submits the runs of a sweep. Add --multirun, or submit one run with sbatch/train.sbatch."
        )
    missing = [command for command in ("sbatch", "srun") if shutil.which(command) is None]
    if missing:
        raise ConfigError(f"{ON_SLURM} needs {missing[0]}, which is not on the PATH. Start the sweep where it is.")


class SweepResults(Callback):
    """Collects the results of a sweep's runs; rank 0 of each run writes, the process that was called reads.

    The runs write one file each, since many may end at once, on machines that share a slow folder. The files stay, so
    that a later call of the sweep ranks the runs of this one, too.
    """

    def __init__(self) -> None:
        self.call = secrets.token_hex(4)  # in each result
        self.reported = False
        self.unwritten: list[Result] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Name the sweep's folder, and remove the summary of an earlier call."""
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
        """Adopt SLURM's rank of this process."""
        with ending_the_sweep():
            adopt_slurm_step()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write the result of a run; end a sweep in this process with the first run that failed."""
        if config.hydra.mode == RunMode.MULTIRUN and job_return.status == JobStatus.COMPLETED:
            with ending_the_sweep():
                self._end_run(config, job_return)

    def _end_run(self, config: DictConfig, job_return: JobReturn) -> None:
        code, submitted = int(job_return.return_value or 0), "SUBMITIT_EXECUTOR" in os.environ
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
        """Show the results, and end with the exit code of the first run that failed.

        Newer versions of Hydra call this after a failure, too, which then continues.
        """
        with ending_the_sweep():
            code = self._report(config)
            if code and sys.exc_info()[0] is None:
                raise SystemExit(code)

    def _write(self, config: DictConfig, job: JobReturn, code: int) -> bool:
        """Write the result of a run, and return whether that worked; where it did not, it is kept for the table."""
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
        shown, path = table(results), folder / RESULTS
        sys.stderr.write(shown)
        failed = [each for each in results if each["exit_code"] and not each["earlier"]]
        code: int = min(failed, key=lambda each: each["number"], default={"exit_code": 0})["exit_code"]
        try:
            write_whole(path, "".join(lines))
            write_whole(folder / TABLE, shown)
        except OSError as error:
            sys.stderr.write(f"{len(results)} runs. {unwritten(path, error)}.\n")
            return code or 1
        sys.stderr.write(f"{len(results)} runs, in {path} and {TABLE}.\n")
        return code or int(bool(self.unwritten))

    def _results(self, folder: Path) -> list[Result]:
        """Return the results of this call's runs, then of earlier ones whose directories are still there, by number."""
        end = time.monotonic() + SECONDS_FOR_A_SLOW_FOLDER
        while True:
            found = ended_runs(folder, call=str, number=int)
            own = {each["number"] for each in found if each["call"] == self.call}
            lost = [job for job in JOBS if job.number not in own]
            if not any(job.state in ("", "COMPLETED") for job in lost) or time.monotonic() > end:
                break
            time.sleep(1)
        states = {job.number: job.state for job in JOBS}
        results = [self._public(each, states) for each in [*found, *self.unwritten]] + [_lost(job) for job in lost]
        taken = {each["run_dir"] for each in results if not each["earlier"]}
        there = {each["run_dir"] for each in results if Path(each["run_dir"]).is_dir()} - taken
        kept = [each for each in results if not each["earlier"] or each["run_dir"] in there]
        return sorted(kept, key=lambda each: (each["earlier"], each["number"], each["run_dir"]))

    def _public(self, result: Result, states: Mapping[int, str]) -> Result:
        """Return a result without the name of its call; with SLURM's state of a job that failed."""
        earlier = result["call"] != self.call
        state = None if earlier or not result["exit_code"] else states.get(result["number"])
        shown = {key: value for key, value in result.items() if key != "call"} | {"earlier": earlier}
        return shown | ({} if state in (None, "", "COMPLETED") else {"state": state})


def _show_changes(path: Path, config: DictConfig) -> None:
    """Show which single values differ from those saved of an earlier call, whose runs continue."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # an item would be interpolated
    try:
        saved = list(load_mapping(path)["hydra"]["overrides"]["task"])
    except (ValueError, LookupError, TypeError):
        saved = []
    now = {key_of(override): redact_argument(override) for override in map(str, typed) if parses(override)}  # not swept
    before = {key_of(override): redact_argument(override) for override in map(str, saved)}
    changed = [f"{before[key]} before, {now[key]} now" for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        sys.stderr.write(
            f"{path.parent} holds a sweep already, whose runs go on: {'; '.join(changed)}. What has ended is not "
            "trained again unless it is given more steps. Another run.name starts another sweep.\n"
        )


_save: Callable[..., None] = OmegaConf.save


def save_redacted(config: Any, f: Any, resolve: bool = False) -> None:
    """Save a configuration; that of a sweep by rank 0 alone, with every secret in it hidden.

    Hydra's sweepers save it before they check the runs' overrides, so that a refused sweep leaves it too.
    """
    if not isinstance(f, str | Path) or Path(f).name != SAVED:
        _save(config, f, resolve)
    elif is_main():
        plain = redacted(OmegaConf.to_container(config, resolve=resolve, enum_to_str=True))
        write_whole(Path(f), to_yaml(plain, allow_unicode=True))


@contextmanager
def ending_the_sweep() -> Iterator[None]:
    """Report what fails in a callback and end the sweep, unless another failure ends it: Hydra would only warn."""
    ending = sys.exc_info()[0] is not None
    try:
        yield
    except Exception as error:
        code = code_of(RunError(f"The sweep ends here: {error}.") if isinstance(error, OSError) else error)
        if not ending:
            raise SystemExit(code) from None


def _lost(job: SlurmJob) -> Result:
    """Return the result of a job that was killed, or cancelled before it began."""
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
