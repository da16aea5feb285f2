"""List and verify a run's checkpoints.

cascade-train checkpoints ls|verify runs/x
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from cascade_train.commands.parts.command_line import Command
from cascade_train.engine.checkpoint.folder import (
    BEST,
    MANIFEST_NAME,
    CheckpointFolder,
    Retention,
    best_value,
    find_fault,
)
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import load_mapping


@dataclass(kw_only=True)
class LsArgs:
    """List a run's checkpoints and why each stays by the run's own rule."""

    source: str
    """The run."""


@dataclass(kw_only=True)
class VerifyArgs(LsArgs):
    """Read every byte of a run's checkpoints and compare it with the manifests; ends with 1 where one is damaged."""

    step: str | None = None
    """One checkpoint, as step_<n>; null = all."""


def list_checkpoints(args: LsArgs) -> int:
    """Print a line for each checkpoint; return 0."""
    folder, rule = _open(args.source)
    complete, metric = folder.complete(), rule.best_metric
    reasons = rule.reasons(complete)
    print(f"{'step':>10} {'GiB':>8} {'age':>6} {metric or 'metric':>14}  state")
    for step, path in folder.visible().items():
        if step in complete:
            state = "; ".join(reasons[step]) or "will be pruned at the next save"
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


def _open(run: str) -> tuple[CheckpointFolder, Retention]:
    """Return a run's folder of checkpoints and its rule."""
    directory = Path(run)
    if not (directory / "checkpoints").is_dir():
        raise ConfigError(f"{run} is no run with checkpoints. Give the folder that holds `checkpoints/`.")
    config = directory / "config.yaml"
    node = load_mapping(config).get("checkpoint", {}) if config.is_file() else {}
    known = {field.name for field in dataclasses.fields(Retention)}
    return CheckpointFolder(directory / "checkpoints"), Retention(**{k: v for k, v in node.items() if k in known})


def _chosen(folder: CheckpointFolder, name: str) -> dict[int, Path]:
    found = {step: path for step, path in folder.visible().items() if name in (path.name, str(step))}
    if not found:
        there = ", ".join(path.name for path in folder.visible().values()) or "none"
        raise ConfigError(f"{name} is not a checkpoint of this run. There are: {there}.")
    return found


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
}
