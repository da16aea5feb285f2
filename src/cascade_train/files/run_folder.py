"""Marks of what this library writes, by which data below a folder is told apart; and a run's folder and its saves."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_mapping

EXPORT, EXPORTED = "export", "exported.json"
BESIDE = ("environment.json", "checkpoints")
"""What lies beside the configuration of a run, of which an export has none."""

_OUTPUTS = {"metrics.jsonl", "multirun.yaml", EXPORTED, "model_index.json", "adapter_config.json", "index.npz"}
"""Files of which one marks a run, a sweep, an export, or a cache of latents."""
_SYSTEMS = {"@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "__MACOSX"}
"""Folders of thumbnails and deleted files that systems leave among pictures."""
_SAMPLE, _GRID = re.compile(r"\d{2,}_\w+\.png"), re.compile(r"grid(_\d+)?\.png")
_log = logging.getLogger("cascade_train.data")  # whose lines `inspect` shows


def exported_step(run: Path) -> int | None:
    """Return the step that a run's export is of; None = unknown."""
    return read_mapping(run / EXPORT / EXPORTED, step=int).get("step")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, however young, and no export."""
    begun = (folder / "config.yaml").is_file() and any((folder / name).exists() for name in BESIDE)
    return begun or (folder / "metrics.jsonl").is_file()


def is_output(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder with files of these names is a run, a sweep, an evaluation, a cache of latents or an export."""
    return not _OUTPUTS.isdisjoint(names) or {"grid.png", "metrics.json"} <= {*names} or is_run(folder)


def _written_beside(names: Collection[str], *, is_root: bool) -> set[str]:
    """Pictures among a user's own that are charts of a run, samples of a model card, or generated.

    Images that were generated into the root itself are data: whoever names their folder means them.
    """
    written = {"loss.png", "loss_by_logsnr.png"} if "metrics.jsonl" in names else set()
    written |= {"samples.png"} if "README.md" in names else set()
    samples = set(filter(_SAMPLE.fullmatch, names)) if "grid.png" in names else set()
    grids = set(filter(_GRID.fullmatch, names)) if samples else set()
    return written | grids | (set() if is_root else samples)


def walk_data(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder of data from `root` on and its files, both in the order of their code points.

    Hidden files, folders of the system and what this library wrote are no data; the last is logged once. A folder that
    is reached again by a link counts once. Raises OSError.
    """
    seen: set[tuple[int, int]] = set()
    outputs: list[str] = []
    for name, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        folder, status = Path(name), os.stat(name)  # noqa: PTH116
        is_root, place = folder == root, (status.st_dev, status.st_ino)
        if place in seen or (not is_root and is_output(folder, names)):
            outputs += [] if place in seen else [folder.relative_to(root).as_posix()]
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(child for child in folders if not child.startswith(".") and child not in _SYSTEMS)
        written = _written_beside(names, is_root=is_root)
        outputs += [(folder / file).relative_to(root).as_posix() for file in sorted(written.intersection(names))[:1]]
        yield folder, sorted(file for file in names if not file.startswith(".") and file not in written)
    if outputs:
        text = "%s: what this library wrote below it (runs, samples, caches, exports) is no data: %s"
        _log.info(text, root, ", ".join(sorted(outputs)[:5]))


def _raise(error: OSError) -> None:
    raise error


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
    """A sentence on a run without a checkpoint; None where it has one."""
    if (run / "export").is_dir() or any((run / "checkpoints").glob("step_*")):
        return None
    return (
        "this run has no checkpoint yet. If it is running, wait for one (checkpoint.every_steps), or press Ctrl-C, "
        "which saves one; if it has ended, its command starts it again."
    )
