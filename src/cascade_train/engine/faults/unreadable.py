"""The list of unreadable samples that a run leaves, for the next run to leave out (`data.quarantine`).

Each rank appends to a file of its own. A sample that is met again after a resume is not listed twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from cascade_train.batch import Unreadable
from cascade_train.files.durable import append_durably, write_durably
from cascade_train.redaction import LONGEST_REASON, redact, shortened

log = logging.getLogger(__name__)


class UnreadableList:
    """One rank's list.

    Args:
        folder: of the run, made with the first sample.
        rank: this process.
        met: what this rank met so far, growing while it trains.
    """

    def __init__(self, folder: Path, *, rank: int, met: Sequence[Unreadable]) -> None:
        """Store; the file is first read when there is something to add."""
        self._path = folder / f"rank_{rank}.jsonl"
        self._met, self._written = met, 0

    def write(self, step: int) -> None:
        """Append what was met since the last call. Not collective; a full disk or a damaged list stops nothing.

        Args:
            step: the optimizer step up to which it was met.
        """
        met = list(dict.fromkeys(self._met[self._written :]))
        if not met:
            return
        try:
            kept = self._listed()
            new = {each.name: _line(each, step) for each in met if each.name not in kept}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_durably(self._path, "".join(new.values()))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning(
                "%s could not be written, or read before (%s); the log names the unreadable samples", self._path, error
            )
        self._written = len(self._met)

    def _listed(self) -> set[str]:
        """Return the samples in the file, once it ends with a whole line: a run may have been killed while it wrote."""
        if not self._path.is_file():
            return set()
        text = self._path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_durably(self._path, whole)
        return {json.loads(line)["sample"] for line in whole.splitlines()}


def _line(unreadable: Unreadable, step: int) -> str:
    reason = redact(shortened(unreadable.reason, LONGEST_REASON))
    return json.dumps({"sample": unreadable.name, "reason": reason, "step": step}) + "\n"
