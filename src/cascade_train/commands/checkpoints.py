"""List, verify, prune and name a run's checkpoints.

cascade-train checkpoints ls|verify|prune|promote runs/x
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cascade_train.commands.parts.command_line import Command
from cascade_train.commands.parts.models import own_keys
from cascade_train.engine.checkpoint.folder import (
    BEST,
    MANIFEST_NAME,
    CheckpointFolder,
    Retention,
    best_value,
    find_fault,
    read_manifest,
    write_manifest,
)
from cascade_train.engine.run.lock import RunLock
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.untrusted import load_mapping
from cascade_train.options import check_choice


@dataclass(kw_only=True)
class LsArgs:
    """List a run's checkpoints and why each stays by the run's own rule."""

    source: str
    """The run; while it trains, nothing in it can be changed."""


@dataclass(kw_only=True)
class VerifyArgs(LsArgs):
    """Read every byte of a run's checkpoints and compare it with the manifests; ends with 1 where one is damaged."""

    step: str | None = None
    """One checkpoint, as step_<n>; null = all."""


@dataclass(kw_only=True)
class PruneArgs(LsArgs):
    """Delete the checkpoints that a rule does not keep, and drop optimizer state; damaged and named ones stay."""

    keep_last: int | None = None
    """Newest checkpoints that stay; null = all stay."""
    keep_every_steps: int | None = None
    """Those at multiples of this step stay too; null = none."""
    keep_best: int | None = None
    """This many with the best value of the run's checkpoint.best_metric stay too; null = none."""
    optimizer: str = "keep"
    """drop = only the newest keep_last (one, where that is null) keep their optimizer state; or keep."""

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, ("keep", "drop"))
        if self.keep_last is None and self.optimizer == "keep":
            raise ConfigError("Nothing is to be pruned: set keep_last, e.g. keep_last=2, or optimizer=drop.")


@dataclass(kw_only=True)
class PromoteArgs(LsArgs):
    """Name a checkpoint, which is then never deleted; name=null removes the name."""

    step: str
    """The checkpoint, as step_<n>."""
    name: str | None
    """What to call it."""


def list_checkpoints(args: LsArgs) -> int:
    """Print a line for each checkpoint; return 0."""
    folder, rule = _open(args.source)
    complete, metric = folder.complete(), rule.best_metric
    reasons = rule.reasons(complete)
    print(f"{'step':>10} {'GiB':>8} {'age':>6} {metric or 'metric':>14}  state")
    for step, path in folder.visible().items():
        if step in complete:
            state = "; ".join(reasons[step]) or "will be pruned at the next save"
            state += "" if complete[step].has_optimizer else " (no optimizer state)"
            facts = complete[step].facts.get(BEST, {})
            value = best_value(complete[step], metric or facts.get("metric"))
        else:
            state, value = f"damaged: {find_fault(path, hashes=False)}", None
        shown = "-" if value is None else f"{value:.6g}"
        print(f"{step:>10} {_size(path) / 2**30:>8.3f} {_age(path):>6} {shown:>14}  {state}")
    return 0


def verify(args: VerifyArgs) -> int:
    """Compare each checkpoint with its manifest, byte by byte; return 0, or 1 where one is damaged."""
    folder, _ = _open(args.source)
    chosen = folder.visible() if args.step is None else _chosen(folder, args.step)
    faults = {path.name: find_fault(path) for path in chosen.values()}
    for name, fault in faults.items():
        print(f"{name}: {'verified' if fault is None else f'damaged: {fault}'}")
    return int(any(fault is not None for fault in faults.values()))


def prune(args: PruneArgs) -> int:
    """Delete checkpoints and optimizer states by a rule, print what was freed, and return 0."""
    folder, own = _open(args.source)
    if args.keep_best is not None and (args.keep_last is None or own.best_metric is None):
        raise ConfigError(
            f"keep_best={args.keep_best} needs keep_last, and checkpoint.best_metric={own.best_metric} of the run."
        )
    keeps = {key: getattr(args, key) for key in ("keep_last", "keep_every_steps", "keep_best")}
    with own_keys("checkpoint", keeps):
        rule = Retention(**keeps, best_metric=own.best_metric, best_mode=own.best_mode)
    with _locked(folder):
        for step, reasons in rule.reasons(folder.complete()).items():
            if not reasons:
                size = _size(folder.path(step))
                folder.delete(step)
                print(f"step_{step} is deleted: {size / 2**30:.3f} GiB")
        if args.optimizer == "drop":
            rest = folder.complete()
            recent = dataclasses.replace(rule, keep_last=args.keep_last or 1).newest(rest)
            for step in [step for step, each in rest.items() if each.has_optimizer and step not in recent]:
                _drop_optimizer(folder, step)
    return 0


def promote(args: PromoteArgs) -> int:
    """Write a name into a checkpoint's manifest; return 0."""
    folder, _ = _open(args.source)
    ((step, path),) = _chosen(folder, args.step).items()
    with _locked(folder):
        taken = {each.name: other for other, each in folder.complete().items() if other != step}
        if args.name is not None and args.name in taken:
            raise ConfigError(f"name={args.name} is that of step_{taken[args.name]} already. Choose another.")
        fault = find_fault(path)
        if fault is not None:
            raise RunError(f"{path} is not promoted, because it is damaged: {fault}")
        write_manifest(path, dataclasses.replace(read_manifest(path), name=args.name))
    print(f"{path.name} {'has no name any more' if args.name is None else f'is {args.name}, and stays for good'}")
    return 0


def _open(run: str) -> tuple[CheckpointFolder, Retention]:
    """Return a run's folder of checkpoints and its rule."""
    directory = Path(run)
    if not (directory / "checkpoints").is_dir():
        raise ConfigError(f"{run} is no run with checkpoints. Give the folder that holds `checkpoints/`.")
    config = directory / "config.yaml"
    node = load_mapping(config).get("checkpoint", {}) if config.is_file() else {}
    known = {field.name for field in dataclasses.fields(Retention)}
    return CheckpointFolder(directory / "checkpoints"), Retention(**{k: v for k, v in node.items() if k in known})


@contextmanager
def _locked(folder: CheckpointFolder) -> Iterator[None]:
    """Hold the lock of the run whose checkpoints the block changes."""
    lock = RunLock(folder.directory.parent.absolute())
    lock.acquire()
    try:
        folder.restore_replaced()
        yield
    finally:
        lock.release()


def _chosen(folder: CheckpointFolder, name: str) -> dict[int, Path]:
    found = {step: path for step, path in folder.visible().items() if name in (path.name, str(step))}
    if not found:
        there = ", ".join(path.name for path in folder.visible().values()) or "none"
        raise ConfigError(f"{name} is not a checkpoint of this run. There are: {there}.")
    return found


def _drop_optimizer(folder: CheckpointFolder, step: int) -> None:
    from cascade_train.engine.checkpoint.loading import drop_optimizer  # heavy: torch

    try:
        freed = drop_optimizer(folder, step)
    except OSError as error:
        raise RunError(f"step_{step} keeps its optimizer state: {error}") from error
    print(f"step_{step} has no optimizer state any more: {freed / 2**30:.3f} GiB")


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir())


def _age(path: Path) -> str:
    seconds = time.time() - (path / MANIFEST_NAME if (path / MANIFEST_NAME).exists() else path).stat().st_mtime
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{seconds / length:.0f} {unit}"


WORDS = ("from", "step")
COMMAND = {
    "ls": Command(arguments=LsArgs, run=list_checkpoints, usage="ls RUN", words=WORDS[:1]),
    "verify": Command(arguments=VerifyArgs, run=verify, usage="verify RUN [step_<n>]", words=WORDS),
    "prune": Command(arguments=PruneArgs, run=prune, usage="prune RUN key=value …", words=WORDS[:1]),
    "promote": Command(arguments=PromoteArgs, run=promote, usage="promote RUN step_<n> name=NAME", words=WORDS),
}
