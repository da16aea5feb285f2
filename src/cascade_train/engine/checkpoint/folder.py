"""The folder of a run's checkpoints: what lies in it, and changes to it that a crash at any moment leaves whole.

Names and renames alone: no tensors, no torch. What is in a checkpoint is said by its manifest.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from cascade_train.engine.checkpoint.manifest import Manifest, find_fault, read_manifest
from cascade_train.files.durable import sync_directory

log = logging.getLogger(__name__)

_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.step_(\d+)\.(saving|replaced|deleting|slimming)")


class CheckpointFolder:
    """`<directory>/step_<n>/`, and hidden beside them what is being written or deleted.

    Attributes:
        directory: the folder; need not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        """Store; touches no file."""
        self.directory = directory

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies, or would."""
        return self.directory / f"step_{step}"

    def hidden(self, step: int, kind: str) -> Path:
        """Return where a checkpoint of a step is made (`saving`, `slimming`) before it is published."""
        return self.directory / f".step_{step}.{kind}"

    def visible(self) -> dict[int, Path]:
        """Return the checkpoints that are there, damaged ones included, by step in order."""
        if not self.directory.is_dir():
            return {}
        matches = ((_VISIBLE.fullmatch(path.name), path) for path in self.directory.iterdir() if path.is_dir())
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def complete(self) -> dict[int, Manifest]:
        """Return the manifests of the checkpoints whose files have their sizes, by step in order."""
        paths = self.visible()
        return {s: read_manifest(path) for s, path in paths.items() if find_fault(path, hashes=False) is None}

    def prepare(self, hidden: Path) -> None:
        """Clear what crashes left behind, and make an empty hidden directory.

        Raises:
            OSError: the folder is not writable.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.restore_replaced()
        for leftover in self._leftovers():
            shutil.rmtree(leftover)
        hidden.mkdir()

    def publish(self, hidden: Path, step: int) -> Path:
        """Put a whole hidden checkpoint in its place, and the one that lay there away.

        Raises:
            OSError: the disk failed; the older one is back at the latest when the folder is next looked at.
        """
        final, replaced = self.path(step), self.hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)
        hidden.rename(final)
        sync_directory(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step; what cannot be deleted is said."""
        doomed = self.hidden(step, "deleting")
        try:
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint of step %d could not be deleted: %s", step, error)

    def restore_replaced(self) -> None:
        """Bring back a checkpoint that a crash caught between moving it aside and putting the new one in its place."""
        for path in self._leftovers():
            final = path.with_name(path.name[1:].removesuffix(".replaced"))
            if path.name.endswith(".replaced") and not final.exists():
                path.rename(final)

    def _leftovers(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if _HIDDEN.fullmatch(path.name))
