"""The list of unreadable samples that a run leaves, for the next run to exclude (`data.quarantine`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from cascade_train.batch import Unreadable
from cascade_train.files.durable import append_durably, read_whole_lines
from cascade_train.redaction import LONGEST_REASON, redact, shortened

log = logging.getLogger(__name__)


class UnreadableList:
    """One rank's list, in a file of its own; a sample that is met again after a resume is not listed twice.

    `folder` is created with the first sample; `met`, the rank's unreadable samples, grows while it trains.
    """

    def __init__(self, folder: Path, *, rank: int, met: Sequence[Unreadable]) -> None:
        self._path = folder / f"rank_{rank}.jsonl"
        self._met, self._written = met, 0
        self._listed: set[str] | None = None

    def write(self, step: int) -> None:
        """Append the samples since the last call, with the step. Not collective; a failed write is only logged."""
        met = list(dict.fromkeys(self._met[self._written :]))
        if not met:
            return
        try:
            if self._listed is None:
                self._listed = {json.loads(line)["sample"] for line in read_whole_lines(self._path)}
            new = {each.name: each.reason for each in met if each.name not in self._listed}
            reasons = {name: redact(shortened(reason, LONGEST_REASON)) for name, reason in new.items()}
            rows = [{"sample": name, "reason": reason, "step": step} for name, reason in reasons.items()]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_durably(self._path, "".join(json.dumps(row) + "\n" for row in rows))
            self._listed.update(new)
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning(
                "%s could not be written, or read before (%s); the log names the unreadable samples", self._path, error
            )
        self._written = len(self._met)
