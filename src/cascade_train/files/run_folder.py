"""Which folder is a run's, and when a young run saves its first checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cascade_train.files.untrusted import read_mapping, read_rows

EXPORT, EXPORTED = "export", "exported.json"
BESIDE = ("environment.json", "checkpoints")
"""What lies beside the configuration of a run, of which an export has none."""


def exported_step(run: Path) -> int | None:
    """Return the step that a run's export is of; None = unknown."""
    return read_mapping(run / EXPORT / EXPORTED, step=int).get("step")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, however young, and no export."""
    begun = (folder / "config.yaml").is_file() and any((folder / name).exists() for name in BESIDE)
    return begun or (folder / "metrics.jsonl").is_file()


def no_checkpoint_yet(run: Path) -> str | None:
    """Return when a run without a checkpoint saves one, as a sentence; None where it has one."""
    if (run / "export").is_dir() or any((run / "checkpoints").glob("step_*")):
        return None
    config = read_mapping(run / "config.yaml")
    step = max((row["step"] for row in read_rows(run / "metrics.jsonl", step=int) if "step" in row), default=0)
    return (
        f"this run has no checkpoint yet. It is at step {step:,}, and saves {_next_save(config, step)}. If it is "
        "running, wait for that, or stop it by Ctrl-C, which saves one; if it has ended, its command starts it again."
    )


def _next_save(config: Any, step: int) -> str:
    try:
        checkpoint, last = config["checkpoint"], config["train"]["max_steps"]
        epochs, every = checkpoint.get("every_epochs"), checkpoint["every_steps"]
    except (LookupError, TypeError, AttributeError):  # damaged
        return "one at its end at the latest"
    if epochs is not None:
        return f"one every {epochs} epochs"
    ends = [each for each in (last, every and (step // every + 1) * every) if each]
    return f"the next at step {min(ends):,}" if ends else "one at its end"
