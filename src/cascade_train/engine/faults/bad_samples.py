"""Samples at fault: those that make a step not finite, and those that cannot be read.

Shape legend: G samples of the global batch.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cascade_train.batch import Unreadable
from cascade_train.distributed.consensus import from_every_rank
from cascade_train.errors import RunError
from cascade_train.files.durable import append_durably, read_whole_lines
from cascade_train.redaction import LONGEST_REASON, redact, shortened

log = logging.getLogger(__name__)

_NAMED = 8
"""Samples that a message names. Where more fail at once, the data is hardly at fault."""

_ADVICE = "lower optimizer.lr or train.max_grad_norm, or raise lr_scheduler.warmup_steps"


@dataclass(frozen=True)
class Trace:
    """One phase's losses of one step, kept on the device until the host reads them.

    `keys` are those of this rank's samples; `loss_G` (G,) fp32, of the global batch in its order, and `grad_norm` ()
    fp32, global, before clipping, are equal on all ranks.
    """

    step: int
    phase: str
    keys: tuple[str, ...]
    loss_G: Tensor
    grad_norm: Tensor

    def is_finite(self) -> Tensor:
        """Whether all are finite, () bool on the device."""
        return self.loss_G.isfinite().all() & self.grad_norm.isfinite()


def not_finite(trace: Trace, *, excluded: Collection[str] = ()) -> RunError:
    """The error of a step, with the command that goes on without the samples at fault. Collective.

    `excluded` are the keys that `data.exclude` names already.
    """
    bad = (~trace.loss_G.isfinite()).nonzero().flatten().tolist()
    keys = [key for rank in from_every_rank(lambda: trace.keys) for key in rank]
    head, per_rank = f"Step {trace.step}, phase {trace.phase}: ", len(trace.keys)
    tail = f"No update was made; the weights are those of step {trace.step - 1}."
    if not bad:
        text = f"every loss is finite but the gradient norm is {float(trace.grad_norm)}. {tail} Remedy: {_ADVICE}."
        return RunError(f"{head}{text}", shared=True)
    where = ", ".join(f"rank {index // per_rank}: {keys[index]}" for index in bad[:_NAMED])
    remedy = f"Remedy: {_ADVICE}."
    if len(bad) <= _NAMED and len(bad) < max(len(keys), 2):  # where all fail, it is hardly one of them
        left_out = shlex.quote(f"data.exclude={json.dumps(sorted({*excluded, *(keys[index] for index in bad)}))}")
        remedy = f"The same command with {left_out} goes on without them. Where other samples fail next, {_ADVICE}."
    text = f"the loss of {len(bad)} of {len(trace.loss_G)} samples is not finite ({where}). {tail} {remedy}"
    return RunError(f"{head}{text}", shared=True)


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
