"""The error of a step whose loss or gradient norm is not finite.

Shape legend: G samples of the global batch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from cascade_train.distributed.consensus import from_every_rank
from cascade_train.errors import RunError

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
