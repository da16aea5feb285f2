"""A module whose weights each rank holds whole: copies in the dtype of compute, and gradients averaged over the ranks.

Nothing is wrapped. Between steps the module holds its stored weights, the masters, so that optimizer, average and
checkpoint see them under their own names; from a forward to `rest` it holds the copies. Lives here: the copies, their
gradients, the all-reduce. Must not live here: when a module is whole, and what the loop calls (parallelize.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 * 2**20
"""Of fp32 gradients that are averaged at once: torch's own choice for DistributedDataParallel."""


class Bucket:
    """Gradients that are taken over, and sent, together.

    Attributes:
        masters: trainable parameters.
        waiting: how many have no gradient of the running backward yet.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.masters: list[nn.Parameter] = []
        self.waiting = 0
        self._flat: Tensor | None = None
        self._sent: list[nn.Parameter] = []
        self._work: dist.Work | None = None

    def send(self, group: ProcessGroup) -> None:
        """Begin to add the gradients over a group's ranks."""
        self._sent = [master for master in self.masters if master.grad is not None]
        if self._sent:
            flat = torch.cat([_gradient(master).flatten() for master in self._sent])
            self._flat = flat.float() if flat.dtype == torch.bfloat16 else flat
            for master in self._sent:
                master.grad = None
            self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self, ranks: int) -> None:
        """Wait for what was sent, and make it the gradients, as their mean."""
        if self._work is None or self._flat is None:
            return
        self._work.wait()
        parts = self._flat.div_(ranks).split([master.numel() for master in self._sent])
        for master, part in zip(self._sent, parts, strict=True):
            master.grad = part.view_as(master).to(master.dtype)
        self._flat, self._work, self._sent = None, None, []


class Whole:
    """What makes a plain module compute in another dtype than its weights have, and average its gradients.

    Attributes:
        last: whether the next backward is the last of the step, after which gradients are averaged.
        group: whose ranks hold the module too; None = this rank alone.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Sequence[nn.Module]],
        *,
        compute_dtype: torch.dtype,
        group: ProcessGroup | None,
    ) -> None:
        """Prepare a module; its weights may still be on the meta device.

        Args:
            root: the module. It is used by its forward alone.
            units: modules that run one after the other; floating inputs of each unit's first are cast.
            compute_dtype: of the copies; a weight that has it already is its own copy.
            group: whose ranks hold the module too; None = this rank alone.
        """
        self.last = True
        self._root = root
        self._dtype = compute_dtype
        self.group = group
        self._slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None
        self._buckets: list[Bucket] = []
        self._next = 0
        self._computing = False
        root.register_forward_pre_hook(lambda *_: self.compute())
        cast_inputs(units, compute_dtype)

    def compute(self) -> None:
        """Put the copies into the module, with the values that the masters have now."""
        if self._computing:
            return
        with torch.no_grad():
            if self._slots is None:
                self._slots = self._make_copies()
            trained = {master: copy for _, _, master, copy in self._slots if master.requires_grad}
            if trained:
                torch._foreach_copy_(list(trained.values()), list(trained))
        for module, leaf, _, copy in self._slots:
            module._parameters[leaf] = copy
        self._computing = True

    def rest(self) -> None:
        """Put the masters back into the module."""
        if self._computing:
            for module, leaf, master, _ in self._slots or ():
                module._parameters[leaf] = master
            self._computing = False

    def settle(self) -> None:
        """Finish the gradients of a step: what was not sent yet is sent, all is received. Collective."""
        if self.group is not None:
            for bucket in self._buckets[self._next :]:
                bucket.send(self.group)
            for bucket in self._buckets:
                bucket.receive(self.group.size())
        self.begin()
        self.rest()

    def begin(self) -> None:
        """Expect a gradient of every parameter in the next backward."""
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.masters)

    def _make_copies(self) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Place, the master and the copy of each weight that has another dtype than compute."""
        slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._root.modules():
            for leaf, master in module.named_parameters(recurse=False):
                if master.is_floating_point() and master.dtype != self._dtype:
                    copy = copies.setdefault(master, nn.Parameter(master.to(self._dtype), master.requires_grad))
                    slots.append((module, leaf, master, copy))
        self._watch([p for p in self._root.parameters() if p.requires_grad], copies)
        return slots

    def _watch(self, masters: Sequence[nn.Parameter], copies: dict[nn.Parameter, nn.Parameter]) -> None:
        """Take over each gradient as it comes, the last layers' first."""
        alone = self.group is None
        size = 0
        for master in reversed(masters):
            if alone and master not in copies:
                continue
            if not self._buckets or size + 4 * master.numel() > BUCKET_BYTES:
                self._buckets.append(Bucket())
                size = 0
            size += 4 * master.numel()
            self._buckets[-1].masters.append(master)
            copies.get(master, master).register_post_accumulate_grad_hook(self._taker(master, self._buckets[-1]))
        self.begin()

    def _taker(self, master: nn.Parameter, bucket: Bucket) -> Any:
        mine = weakref.ref(self)  # a tensor's hook must not keep the module that the tensor is of

        def take(computed: Tensor) -> None:
            if computed is not master:
                assert computed.grad is not None
                if master.grad is None:
                    master.grad = computed.grad.to(master.dtype)
                else:
                    master.grad += computed.grad
                computed.grad = None
            whole = mine()
            if whole is not None and whole.last and whole.group is not None:
                bucket.waiting -= 1
                whole._send_complete(whole.group)

        return take

    def _send_complete(self, group: ProcessGroup) -> None:
        """Send the buckets that are complete, in their order, which is the same on every rank."""
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._buckets[self._next].send(group)
            self._next += 1


def cast_inputs(units: Sequence[Sequence[nn.Module]], dtype: torch.dtype) -> None:
    """Cast what each unit's first module is called with, from then on, where it is floating."""

    def as_computed(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(as_computed, args)), {name: as_computed(value) for name, value in kwargs.items()}

    for unit in units:
        unit[0].register_forward_pre_hook(cast, with_kwargs=True)


def _gradient(master: nn.Parameter) -> Tensor:
    assert master.grad is not None
    return master.grad
