"""Units of a network that only repeat others in a rehearsal: what lives meanwhile is copied, and nothing is run.

Of units in a row that are alike, the first and the last two run. What lies between is replaced by one operation, whose
forward lives as that of the unit before, and whose backward as that of the unit after, which runs earlier. All is
compared on the way: sizes of what begins and ends in the operation, and layouts of gradients. `Unlike` says that a unit
is not what it was taken for, and that the rehearsal is to be made anew without this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.assembly.planning.live import Live, Part

ATTENTION = "SDCascadeAttnBlock"
"""Kind of the blocks that use the condition tokens."""

Run = Callable[..., Tensor]
"""Runs a unit on its blocks, their kinds, the latent, and what each takes beside it."""


class Unlike(Exception):  # noqa: N818
    """A unit differs from the one whose record was taken for it."""


@dataclass(eq=False)
class Record:
    """One execution of a unit.

    Attributes:
        alike: what units must have in common to live alike.
        forward: what its forward made and freed.
        backward: the same of its backward, once that has run.
        made: layout of its result.
        after: the execution of the next unit.
        gradients: layouts of the gradients of its result and of the latent.
        waiting: of a unit that was not run, the storages that it would have kept for backward.
    """

    alike: Any
    forward: Part | None = None
    backward: Part | None = None
    made: Any = None
    after: Record | None = None
    gradients: list[Any] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


class Repeats:
    """Runs the units of a network, as `CascadeUNet.run_unit`."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last: Record | None = None
        self._kinds: dict[nn.Module, Any] = {}

    def __call__(
        self, run: Run, arguments: Sequence[Any], following: Sequence[Sequence[nn.Module]], uncontrolled: int
    ) -> Tensor:
        """Return the latent after a unit.

        Args:
            run: runs it.
            arguments: of `run`: blocks, kinds, latent, time, condition tokens, skip, control map.
            following: the units behind it in its row.
            uncontrolled: units from it on that take no control map.
        """
        unit, kinds, x, time, clip, skip, control = arguments
        if not (torch.is_grad_enabled() and x.requires_grad):
            self._last = None
            return run(*arguments)
        sides = [_layout(each) for each in (x, time, clip, skip, control) if each is not None]
        before, record = self._last, Record(alike=(self._kind(unit), sides))
        if before is not None:
            before.after = record
        self._last = record if following else None
        is_middle = len(following) > 1 and uncontrolled > 2 and skip is None
        is_middle = is_middle and all(self._kind(each) == record.alike[0] for each in following[:2])
        if is_middle and before is not None and before.alike == record.alike and before.made == _layout(x):
            return self._repeated(record, before, unit, x, time, *([clip] if ATTENTION in kinds else []))
        x = _Mark.apply(x, partial(self._backward_ends, record))
        part = self._live.begin_part()
        x = run(*arguments[:2], x, *arguments[3:])
        record.forward, record.made = self._live.end_part(part), _layout(x)
        made: Tensor = _Mark.apply(x, partial(self._backward_begins, record))
        return made

    def _repeated(self, record: Record, before: Record, unit: Sequence[nn.Module], *sides: Tensor) -> Tensor:
        record.forward, record.made = before.forward, before.made
        assert record.forward is not None
        x = _Mark.apply(sides[0], partial(self._repeat_ends, record))
        part = self._live.begin_part(quiet=True)
        weights = [p for block in unit for p in block.parameters() if p.requires_grad]
        x = _Repeated.apply(x, *sides[1:], *weights)
        self._copy(record, record.forward, part)
        made: Tensor = _Mark.apply(x, partial(self._repeat_begins, record))
        return made

    def _backward_begins(self, record: Record, gradient: Tensor) -> None:
        record.gradients.append(_layout(gradient))
        self._part = self._live.begin_part()

    def _backward_ends(self, record: Record, gradient: Tensor) -> None:
        record.gradients.append(_layout(gradient))
        record.backward = self._live.end_part(self._part)

    def _repeat_begins(self, record: Record, gradient: Tensor) -> None:
        after, mine = record.after, _layout(gradient)
        if after is None or after.backward is None or after.alike != record.alike or after.gradients != [mine, mine]:
            raise Unlike("gradients")
        record.gradients, record.backward = after.gradients, after.backward
        self._part = self._live.begin_part(quiet=True)

    def _repeat_ends(self, record: Record, gradient: Tensor) -> None:
        assert record.backward is not None
        self._copy(record, record.backward, self._part)

    def _copy(self, record: Record, known: Part, part: Part) -> None:
        waiting = self._live.copy_part(known, part, record.waiting)
        if waiting is None:
            raise Unlike("storages")
        record.waiting = waiting

    def _kind(self, unit: Sequence[nn.Module]) -> Any:
        """Return what units have in common that are alike, whatever their weights' values."""
        if unit[0] not in self._kinds:
            modules = [module for block in unit for module in block.modules()]
            named = [each for block in unit for each in block.named_parameters()]
            self._kinds[unit[0]] = (
                [(type(m), m.training, m.extra_repr()) for m in modules],
                [(name, p.shape, p.dtype, p.requires_grad) for name, p in named],
            )
        return self._kinds[unit[0]]


class _Mark(torch.autograd.Function):
    """Identity that reports when the gradient of its tensor is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.tell(gradient)
        return gradient, None


class _Repeated(torch.autograd.Function):
    """Replaces a unit: an output of the latent's shape, and a gradient for all that needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # units that run keep what others share
        ctx.others = [(each.shape, each.stride(), each.dtype) for each in others]
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device) if need else None
            for (shape, stride, dtype), need in zip(ctx.others, ctx.needs_input_grad[1:], strict=True)
        ]
        return torch.empty_like(gradient), *made


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
