"""Finds bad steps: a loss or gradient norm that is not finite, or a loss spike. For what follows see rollback.py.

Shape legend: G samples of the global batch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_train.distributed.consensus import from_every_rank
from cascade_train.errors import RunError

_NAMED = 8
"""Samples that a message names; the error has all."""


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
        """Return () bool on the device."""
        return self.loss_G.isfinite().all() & self.grad_norm.isfinite()


class BadStepError(RunError):
    """An optimizer step that must be undone; every rank raises the same one.

    `keys` are those of the samples at fault, over all ranks; of the whole global batch where none stands out.
    """

    def __init__(self, message: str, *, step: int, keys: Sequence[str]) -> None:
        super().__init__(message, shared=True)
        self.step = step
        self.keys = tuple(keys)


def not_finite(trace: Trace) -> BadStepError:
    """Return the error of a step with a loss or norm that is not finite. Collective."""
    bad = (~trace.loss_G.isfinite()).nonzero().flatten().tolist()
    keys, where = _culprits(trace, bad)
    head = f"Step {trace.step}, phase {trace.phase}: "
    tail = f" No update was made; the weights are those of step {trace.step - 1}."
    if not bad:
        text = f"{head}every loss is finite but the gradient norm is {float(trace.grad_norm)}.{tail}"
    else:
        text = f"{head}the loss of {len(bad)} of {len(trace.loss_G)} samples is not finite ({where}).{tail}"
    return BadStepError(text, step=trace.step, keys=keys)


class SpikeWatch:
    """Compares the mean loss of each step with the running median of those before it, phase by phase.

    More than `factor` times the median of `window_steps` losses is a spike; before that many are known, nothing is.
    """

    def __init__(self, *, factor: float, window_steps: int) -> None:
        self._factor, self._window_steps = factor, window_steps
        self._losses: dict[str, deque[float]] = {}
        self._checked: dict[str, int] = {}

    def check(self, traces: Sequence[Trace]) -> None:
        """Raise a BadStepError for a spike in the steps not checked yet, all finite. Syncs. Collective on a spike."""
        new = [trace for trace in traces if trace.step > self._checked.get(trace.phase, 0)]
        if not new:
            return
        means = torch.stack([trace.loss_G.mean() for trace in new]).tolist()
        for trace, mean in zip(new, means, strict=True):
            losses = self._losses.setdefault(trace.phase, deque(maxlen=self._window_steps))
            median = statistics.median(losses) if len(losses) == self._window_steps else 0.0
            if 0.0 < median * self._factor < mean:
                raise self._spike(trace, mean, median)
            losses.append(mean)
            self._checked[trace.phase] = trace.step

    def state_dict(self) -> dict[str, list[float]]:
        """Return the losses of the window by phase, equal on all ranks, as JSON values."""
        return {phase: list(losses) for phase, losses in self._losses.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue with other losses; all further steps are checked."""
        self._losses = {phase: deque(losses, maxlen=self._window_steps) for phase, losses in state.items()}
        self._checked = {}

    def _spike(self, trace: Trace, mean: float, median: float) -> BadStepError:
        keys, where = _culprits(trace, (trace.loss_G > self._factor * median).nonzero().flatten().tolist())
        return BadStepError(
            f"Step {trace.step}, phase {trace.phase}: the loss {mean:.4g} is more than {self._factor:g} times"
            f" {median:.4g}, the median of the {self._window_steps} steps before ({where}).",
            step=trace.step,
            keys=keys,
        )


def _culprits(trace: Trace, indices: Sequence[int]) -> tuple[list[str], str]:
    """Return the keys of these samples of the global batch, or of all, and a text that names some. Collective."""
    keys = [key for rank in from_every_rank(lambda: trace.keys) for key in rank]
    per_rank = len(trace.keys)
    where = ", ".join(f"rank {index // per_rank}: {keys[index]}" for index in indices[:_NAMED])
    return [keys[index] for index in indices] or keys, where
