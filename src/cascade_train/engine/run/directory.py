"""A run's directory: claimed, continued, and what a start records in it; refuses what would lose or mix up results."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.engine.checkpoint.folder import find_fault, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.metrics import cut_lines
from cascade_train.engine.run.config_difference import (
    Difference,
    describe,
    find_differences,
    is_limit_raised,
    limits_of,
    refused,
)
from cascade_train.engine.run.lock import CONFIG as _CONFIG
from cascade_train.engine.run.lock import LOCK_NAME, RunLock, check_folder, not_writable
from cascade_train.engine.trackers import TRACKERS
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import append_durably, to_yaml, write_durably
from cascade_train.files.run_folder import EXPORT, EXPORTED
from cascade_train.files.untrusted import load_mapping, read_mapping
from cascade_train.redaction import redact_argument, redacted
from cascade_train.signals import defer_signals

log = logging.getLogger(__name__)

_HISTORY, _START = "config_history.jsonl", "start.json"
_METRICS, _CHECKPOINTS, _SAMPLES = "metrics.jsonl", "checkpoints", "samples"
_BEFORE_THE_FIRST_STEP = {
    _CONFIG, "environment.json", "weights.json", _HISTORY, LOCK_NAME, "quarantine", "listing.json", _SAMPLES, _START,
    *TRACKERS,
}  # fmt: skip
"""What a start creates before there is anything to lose: our files, the first grid, the trackers' folders."""

_PACKAGES = (
    "accelerate", "cascade-train", "diffusers", "hydra-core", "numpy", "omegaconf", "peft", "pillow", "safetensors",
    "torch", "torchvision", "transformers", "webdataset",
)  # fmt: skip
_GIT_SECONDS = 10


@dataclass(kw_only=True)
class RunDirectory:
    """A claimed run directory, by its absolute path.

    Attributes:
        config: of this start, without secrets.
        resume_from: a verified checkpoint to continue from; None = from the start.
        finished: there is nothing left to do.
        differences: settings that a continued run changes.
        created: this claim made the directory.
        lock: held by rank 0.
    """

    path: Path
    config: Mapping[str, Any]
    resume_from: Path | None
    finished: bool = False
    differences: Sequence[Difference] = ()
    created: bool
    lock: RunLock

    def __post_init__(self) -> None:
        self.checkpoints = self.path / _CHECKPOINTS
        self.samples = self.path / _SAMPLES
        self.export = self.path / EXPORT
        self.quarantine = self.path / "quarantine"
        self.metrics_path = self.path / _METRICS

    def cut_metrics(self, step: int) -> None:
        """Drop the lines of `metrics.jsonl` after `step`, and torn ones; a RunError leaves it as it was. Collective."""
        from_rank_zero(lambda: cut_lines(self.metrics_path, step or -1))  # step 0 is measured again

    def record_start(self, start: Mapping[str, Any]) -> None:
        """Write the facts of a start, JSON values, and the settings that a continued run changes. Collective."""

        def record() -> None:
            if not self.created:
                _record_continuation(self)
            write_durably(self.path / _START, json.dumps(redacted(start), indent=2) + "\n")

        from_rank_zero(record)

    def record_exports(self, step: int) -> None:
        """Note that `export/` has the results of `step`: only then is a run finished. Collective."""
        text = json.dumps({"step": step, "limits": limits_of(self.config)}) + "\n"
        from_rank_zero(lambda: write_durably(self.export / EXPORTED, text))

    def record_stop(self, stop: dict[str, Any] | None) -> None:
        """Note why a run ended before its last step, for scripts; None = it goes on. Collective."""
        path, text = self.path / "stopped.json", json.dumps(stop) + "\n"
        from_rank_zero(lambda: path.unlink(missing_ok=True) if stop is None else write_durably(path, text))

    def withdraw(self) -> None:
        """Remove a directory that this claim made and that holds no results yet, on rank 0. Not collective."""
        if dist.get_rank() == 0 and self.created and self.path.is_dir() and _is_untouched(self.path):
            shutil.rmtree(self.path.resolve())

    @contextmanager
    def withdrawn_on_failure(self) -> Iterator[None]:
        """Withdraw when the block, the start after the claim, fails, so that it leaves nothing new."""
        try:
            yield
        except Exception:
            self.withdraw()
            raise


@contextmanager
def claimed(
    directory: Path, *, config: Mapping[str, Any], resume: str, free_keys: Collection[str] = ()
) -> Iterator[RunDirectory]:
    """Claim a run directory for the block; a signal or refusal before the first step leaves nothing. Collective."""
    claims: list[RunDirectory] = []
    try:
        yield claim(directory, config=config, resume=resume, free_keys=free_keys, claims=claims)
    except (KeyboardInterrupt, ConfigError):
        for run in claims:
            run.withdraw()
        raise
    finally:
        for run in claims:
            run.lock.release()


def claim(
    directory: Path,
    *,
    config: Mapping[str, Any],
    resume: str,
    free_keys: Collection[str] = (),
    claims: list[RunDirectory] | None = None,
) -> RunDirectory:
    """Make a run directory, or continue the run in it from its newest checkpoint that verifies. Collective.

    A continued run may change the settings of `config_difference` and those that components declare (`free_keys`), one
    that ended before its first step all settings; `record_start` records them. Anything else is refused (ConfigError;
    RunError: no checkpoint verifies) and leaves nothing.

    `resume` is "auto" (continue where there is a run, else start), "never" (refuse where there is one), or a checkpoint
    or run that a new run starts from. `claims` gets the claim of rank 0, as soon as there is something to withdraw.
    """
    plain: dict[str, Any] = redacted(config)
    pending = [] if claims is None else claims
    return from_rank_zero(lambda: _claim(directory.absolute(), plain, resume, free_keys, pending))


def _claim(
    directory: Path, config: dict[str, Any], resume: str, free_keys: Collection[str], claims: list[RunDirectory]
) -> RunDirectory:
    lock = RunLock(directory)
    if (directory / _CONFIG).is_file():
        lock.acquire()
        try:
            claims.append(_continue_run(directory, config, resume, free_keys, lock))
            return claims[-1]
        except BaseException:
            lock.release()
            raise
    check_folder(directory)
    origin = None if resume in ("auto", "never") else _find_origin(resume)
    with defer_signals():
        _create(directory, config)
        claims.append(RunDirectory(path=directory, config=config, resume_from=origin, created=True, lock=lock))
    lock.acquire()
    return claims[-1]


def _is_untouched(directory: Path) -> bool:
    names = {path.name for path in directory.iterdir()}
    grids = {path.name for path in (directory / _SAMPLES).iterdir()} if _SAMPLES in names else set()
    return names <= _BEFORE_THE_FIRST_STEP and grids <= {"step_0"}


def _continue_run(
    directory: Path, config: dict[str, Any], resume: str, free_keys: Collection[str], lock: RunLock
) -> RunDirectory:
    if resume == "never":
        raise ConfigError(
            f"run.dir={directory} already holds a run and run.resume=never. Remedy: run.resume=auto to continue it, "
            "or another run.name (or run.dir)"
        )
    saved = redacted(load_mapping(directory / _CONFIG))
    began_from = saved.get("run", {}).get("resume", "auto")
    if resume == "auto" and began_from != "never":
        config = {**config, "run": {**config["run"], "resume": began_from}}  # the origin stays on record
    differences = find_differences(saved, config)
    may_change = config.get("data", {}).get("on_change") == "restart"
    blocking = refused(differences, free_keys=free_keys, data_may_change=may_change)
    if blocking and not _is_untouched(directory):
        goes_on = ", or data.on_change=restart to go on with the new" if all(d.is_of_data for d in blocking) else ""
        raise ConfigError(
            f"run.dir={directory} holds a run of another config:\n{describe(blocking)}\n"
            "Remedy: another run.name (or run.dir) for a new run, or the old values to continue this one" + goes_on
        )
    checkpoint = _newest(directory)
    if resume != "auto":
        checkpoint = _reconcile(directory, checkpoint, resume, began_from)
    elif checkpoint is None and began_from not in ("auto", "never"):
        log.warning(
            "This run began from run.resume=%s and has no checkpoint of its own: run.resume=auto begins it anew, from"
            " the model's weights.", began_from
        )  # fmt: skip
    finished = checkpoint is not None and _is_finished(directory, checkpoint, saved, config)
    if not finished:
        _check_writable(directory)
    return RunDirectory(
        path=directory,
        config=config,
        resume_from=checkpoint,
        finished=finished,
        differences=differences,
        created=False,
        lock=lock,
    )


def _check_writable(directory: Path) -> None:
    try:
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={directory} is not writable: {error}. Remedy: make it so, or a new run") from error


def _is_finished(directory: Path, checkpoint: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the run ended with this checkpoint and wrote its exports, and no limit was raised since."""
    manifest = read_manifest(checkpoint)
    exported = read_mapping(directory / EXPORT / EXPORTED, step=int, limits=dict)
    ended = bool(manifest.facts.get("finished")) and exported.get("step") == manifest.step
    return ended and not is_limit_raised(exported.get("limits", limits_of(saved)), limits_of(config))


def _newest(directory: Path) -> Path | None:
    store = CheckpointStore(directory / _CHECKPOINTS)
    newest = store.newest()
    if newest is None and store.steps():
        raise RunError(
            f"none of the checkpoints in {store.directory} verifies (steps {store.steps()}), so the run cannot "
            "continue. Remedy: restore them from a backup, or move them away to start this run over"
        )
    return newest


def _reconcile(directory: Path, own: Path | None, resume: str, began_from: str) -> Path:
    if own is not None and resume == began_from and directory.resolve() not in Path(resume).resolve().parents:
        log.info("run.resume=%s is where this run began; it continues from its own %s", resume, own)
        return own  # whether or not the other run still has that checkpoint
    origin = _find_origin(resume)
    if own is None or origin.resolve() == own.resolve():
        return origin
    raise ConfigError(
        f"run.resume={resume}, but the run in {directory} has its own newer {own.name}, which would be lost. Remedy: "
        "run.resume=auto to continue from that, or another run.name to start a new run from the checkpoint"
    )


def _find_origin(resume: str) -> Path:
    path = Path(resume).absolute()
    if not path.is_dir():
        raise ConfigError(f"run.resume={resume} is neither auto, never, nor a directory that exists")
    if (path / _CONFIG).is_file():
        newest = _newest(path)
        if newest is None:
            raise ConfigError(f"run.resume={resume} is a run without checkpoints")
        return newest
    fault = find_fault(path)
    if fault is not None:
        raise ConfigError(f"run.resume={resume} is not a checkpoint that verifies: {fault}")
    return path


def _create(directory: Path, config: dict[str, Any]) -> None:
    directory = directory.resolve()  # a link stays one
    beside = directory.with_name(f".{directory.name}.{os.getpid()}.claim")
    try:
        beside.mkdir(parents=True)
        write_durably(beside / _CONFIG, to_yaml(config))
        write_durably(beside / "environment.json", json.dumps(describe_environment(), indent=2) + "\n")
        beside.rename(directory)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if (directory / _CONFIG).is_file():
            raise ConfigError(
                f"run.dir={directory} was made by another process just now. Remedy: another run.name"
            ) from error
        raise not_writable(directory, error) from error


def _record_continuation(run: RunDirectory) -> None:
    line = {
        "step": read_manifest(run.resume_from).step if run.resume_from else 0,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume_from": str(run.resume_from) if run.resume_from else None,
        "changes": {difference.key: [difference.old, difference.new] for difference in run.differences},
        "environment": describe_environment(),
    }
    append_durably(run.path / _HISTORY, json.dumps(line) + "\n")
    if run.differences:
        write_durably(run.path / _CONFIG, to_yaml(run.config))
        log.info("continuing %s with changed settings:\n%s", run.path, describe(run.differences))
    if run.resume_from is None and run.metrics_path.exists():
        log.warning("%s has no checkpoint: the run starts over at step 1", run.path)


def describe_environment() -> dict[str, Any]:
    """Time, versions, git commit of the code, command line and devices as JSON values.

    No environment variable is included, and secrets on the command line are hidden. A package that is not installed,
    and a commit where the code is not a checkout, are None.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {**{name: _version(name) for name in _PACKAGES}, "torch": torch.__version__},
        "git_commit": _git_commit(Path(__file__).resolve()),
        "command_line": [redact_argument(argument) for argument in sys.orig_argv],
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_commit(file: Path) -> str | None:
    """Commit of the checkout that tracks `file`, as it was first, with `+changes` if it is not clean."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
