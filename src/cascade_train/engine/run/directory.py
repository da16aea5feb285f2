"""A run's directory: claiming it, continuing in it, and refusing what would lose or mix up results."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.engine.checkpoint.folder import find_fault, read_manifest
from cascade_train.engine.checkpoint.store import NO_OPTIMIZER, CheckpointStore
from cascade_train.engine.metrics import cut_lines, missing_steps
from cascade_train.engine.run.config_difference import Difference, describe, find_differences, is_limit_raised, refused
from cascade_train.engine.run.environment import describe_environment
from cascade_train.engine.run.lock import CONFIG as _CONFIG
from cascade_train.engine.run.lock import LOCK_NAME, RunLock, check_folder, not_writable
from cascade_train.engine.trackers import TRACKERS
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import append_durably, to_yaml, write_durably
from cascade_train.files.run_folder import EXPORT, EXPORTED, exported_step
from cascade_train.files.untrusted import load_mapping, read_regular, read_rows
from cascade_train.redaction import redacted
from cascade_train.signals import defer_signals

log = logging.getLogger(__name__)

_HISTORY = "config_history.jsonl"
_METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"
_SAMPLES = "samples"
_START = "start.json"
_BEFORE_THE_FIRST_STEP = {
    _CONFIG, "environment.json", "weights.json", _HISTORY, LOCK_NAME, "quarantine", "listing.json", _SAMPLES, _START,
    *TRACKERS,
}  # fmt: skip
"""What a start creates before there is anything to lose: our files, the first grid, the trackers' folders."""


@dataclass(kw_only=True)
class RunDirectory:
    """A claimed run directory, by its absolute path.

    Attributes:
        resume_from: a verified checkpoint to continue from; None = from the start.
        finished: there is nothing left to do.
        created: this claim made the directory.
        lock: held by rank 0.
        before: former contents of the files that this claim changed, by their names; None = there was no file.
    """

    path: Path
    resume_from: Path | None
    finished: bool
    created: bool
    lock: RunLock
    before: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoints = self.path / _CHECKPOINTS
        self.samples = self.path / _SAMPLES
        self.export = self.path / EXPORT
        self.quarantine = self.path / "quarantine"
        self.metrics_path = self.path / _METRICS

    def cut_metrics(self, step: int) -> None:
        """Drop the lines of `metrics.jsonl` after `step`, and torn ones; a RunError leaves it as it was. Collective."""
        from_rank_zero(lambda: cut_lines(self.metrics_path, step))

    def record_start(self, start: Mapping[str, Any]) -> None:
        """Write facts of the latest start, JSON values, for the page of the run. Collective."""
        text = json.dumps(redacted(start), indent=2) + "\n"
        from_rank_zero(lambda: write_durably(self.path / _START, text))

    def record_exports(self, step: int) -> None:
        """Note that `export/` has the results of `step`: only then is a run finished. Collective."""
        from_rank_zero(lambda: write_durably(self.export / EXPORTED, json.dumps({"step": step}) + "\n"))

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
            for name, text in self.before.items() if dist.get_rank() == 0 else ():
                if text is None:
                    (self.path / name).unlink(missing_ok=True)
                else:
                    write_durably(self.path / name, text)
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
    that ended before its first step all settings. Changes are recorded in `config_history.jsonl`. Anything else is
    refused (ConfigError; RunError: no checkpoint verifies) and leaves nothing.

    `resume` is "auto" (continue where there is a run, else start), "never" (refuse where there is one), or a checkpoint
    or run that a new run starts from. `claims` gets the claim of rank 0, as soon as there is something to withdraw.
    """
    plain: dict[str, Any] = redacted(config)
    made = [] if claims is None else claims
    return from_rank_zero(lambda: _claim(directory.absolute(), plain, resume, free_keys, made))


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
        claims.append(RunDirectory(path=directory, resume_from=origin, finished=False, created=True, lock=lock))
    lock.acquire()
    return claims[-1]


def _is_untouched(directory: Path) -> bool:
    made = {path.name for path in directory.iterdir()}
    grids = {path.name for path in (directory / _SAMPLES).iterdir()} if _SAMPLES in made else set()
    return made <= _BEFORE_THE_FIRST_STEP and grids <= {"step_0"}


def _continue_run(
    directory: Path, config: dict[str, Any], resume: str, free_keys: Collection[str], lock: RunLock
) -> RunDirectory:
    other_name = "another run.name (or run.dir)"
    if resume == "never":
        raise ConfigError(
            f"run.dir={directory} already holds a run and run.resume=never. Remedy: run.resume=auto to continue it, "
            f"or {other_name}"
        )
    saved = redacted(load_mapping(directory / _CONFIG))
    differences = find_differences(saved, config)
    may_change = config.get("data", {}).get("on_change") == "restart"
    blocking = refused(differences, free_keys=free_keys, data_may_change=may_change)
    if blocking and not _is_untouched(directory):
        goes_on = ", or data.on_change=restart to go on with the new" if all(d.is_of_data for d in blocking) else ""
        raise ConfigError(
            f"run.dir={directory} holds a run of another config:\n{describe(blocking)}\n"
            f"Remedy: {other_name} for a new run, or the old values to continue this one{goes_on}"
        )
    checkpoint, origins = _newest(directory), _find_origins(directory, saved)
    if resume != "auto":
        checkpoint = _reconcile(directory, checkpoint, resume, origins)
    elif checkpoint is None and origins:
        log.warning(
            "This run began from run.resume=%s and has no checkpoint of its own: run.resume=auto begins it anew, from"
            " the model's weights.", " and ".join(sorted(origins))
        )  # fmt: skip
    if checkpoint is not None and directory in checkpoint.parents:
        _report_lost_metrics(directory, read_manifest(checkpoint).step, is_continued=bool(origins))
    finished = checkpoint is not None and _is_finished(directory, checkpoint, saved, config)
    paths = {name: directory / name for name in (_CONFIG, _HISTORY)}
    before = {n: read_regular(path).decode(errors="replace") if path.is_file() else None for n, path in paths.items()}
    if not finished:
        _record_continuation(directory, config, differences, checkpoint)
    return RunDirectory(
        path=directory, resume_from=checkpoint, finished=finished, created=False, lock=lock, before=before
    )


def _is_finished(directory: Path, checkpoint: Path, saved: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether the run ended with this checkpoint, wrote its exports, and no limit was raised since."""
    manifest = read_manifest(checkpoint)
    then = {node: dict(saved.get(node, {})) for node in ("train", "data")}
    for line in reversed(_read_history(directory)):  # undo the changes of earlier attempts to continue from it
        if line["step"] != manifest.step:
            break
        for key, (old, _) in line["changes"].items():
            node, _, name = key.rpartition(".")
            if node in then:
                then[node][name] = old
    ended = bool(manifest.facts.get("finished")) and exported_step(directory) == manifest.step
    return ended and not is_limit_raised(then, config)


def _find_origins(directory: Path, saved: dict[str, Any]) -> set[str]:
    """Return the values of `run.resume`, now or earlier, that name another run's checkpoint."""
    changes = [line["changes"].get("run.resume", ["auto"]) for line in _read_history(directory)]
    return {saved.get("run", {}).get("resume", "auto"), *(old for old, *_ in changes)} - {"auto", "never"}


def _report_lost_metrics(directory: Path, step: int, *, is_continued: bool) -> None:
    """Warn of steps that `metrics.jsonl` lacks; a run that began from another's checkpoint has fewer."""
    path = directory / _METRICS
    missing = missing_steps(path, first=None if is_continued else 1, last=step)
    if missing:
        log.warning(
            "%s lacks the lines of %d steps (%d to %d) that this run took: it was deleted or cut. The run goes on,"
            " without them in its loss curve. Remedy: restore the file from a backup, if there is one.",
            *(path, len(missing), missing[0], missing[-1]),
        )


def _read_history(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(directory / _HISTORY, step=int, changes=dict) if {"step", "changes"} <= row.keys()]


def _newest(directory: Path) -> Path | None:
    store = CheckpointStore(directory / _CHECKPOINTS)
    newest = store.newest()
    if newest is None and store.steps():
        raise RunError(
            f"none of the checkpoints in {store.directory} verifies (steps {store.steps()}) and has its optimizer "
            "state, so the run cannot continue. Remedy: restore them from a backup, or move them away to start this "
            "run over"
        )
    return newest


def _reconcile(directory: Path, own: Path | None, resume: str, origins: Collection[str]) -> Path:
    if own is not None and resume in origins and directory.resolve() not in Path(resume).resolve().parents:
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
    if not read_manifest(path).has_optimizer:
        raise ConfigError(f"run.resume: {NO_OPTIMIZER.format(path=path)}")
    return path


def _create(directory: Path, config: dict[str, Any]) -> None:
    directory = directory.resolve()  # a link stays one
    missing_parents = [path for path in directory.parents if not path.exists()]
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
        for parent in missing_parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise not_writable(directory, error) from error


def _record_continuation(
    directory: Path, config: dict[str, Any], differences: list[Difference], checkpoint: Path | None
) -> None:
    line = {
        "step": read_manifest(checkpoint).step if checkpoint else 0,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume_from": str(checkpoint) if checkpoint else None,
        "changes": {each.key: [each.old, each.new] for each in differences},
        "environment": describe_environment(),
    }
    try:
        append_durably(directory / _HISTORY, json.dumps(line) + "\n")
        if differences:
            write_durably(directory / _CONFIG, to_yaml(config))
    except OSError as error:
        raise ConfigError(f"run.dir={directory} is not writable: {error}. Remedy: make it so, or a new run") from error
    if checkpoint is None and (directory / _METRICS).exists():
        log.warning("%s has no checkpoint: the run starts over at step 1", directory)
    if differences:
        log.info("continuing %s with changed settings:\n%s", directory, describe(differences))
