"""Which folder is a run's, when a young run saves its first checkpoint, and folders for what a run makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError
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


def run_named(key: str, name: str) -> Path:
    """Return the folder of a run that an argument names; a ConfigError where it is none, or an export."""
    folder, has_config = Path(name), (Path(name) / "config.yaml").is_file()
    if not has_config or not is_run(folder):
        lacking = " and no ".join(BESIDE) if has_config else "config.yaml"
        raise ConfigError(f"{key}={name}: is no run; it has no {lacking}. Name the folder of a run.")
    return folder


def make_folder(out: Path) -> Path:
    """Return a folder, made if it is missing; a ConfigError where it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be a folder: {error.strerror}. Choose another.") from error
    return out


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
