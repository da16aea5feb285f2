"""A running average of the weights, on their device or on the host, which can be swapped in for an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from cascade_train.distributed.parallelize import like, local, part_of, reshard
from cascade_train.engine.checkpoint.writing import Background, HostMemory


class Ema:
    """A running average in fp32 of named parameters.

    ema <- decay * ema + (1 - decay) * weights, every `every_steps` optimizer steps; before `start_step` the
    average is a plain copy (Stable Cascade, train/base.py, which counts micro-batches instead).

    `parameters` are already sharded, and `device` is that of the average; None = that of the weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        decay: float,
        start_step: int,
        every_steps: int,
        device: torch.device | None,
    ) -> None:
        self.decay = decay
        self.start_step = start_step
        self.every_steps = every_steps
        self._parameters = dict(parameters)
        self._average = {
            name: local(p.detach()).to(device=device or p.device, dtype=torch.float32, copy=True)
            for name, p in parameters.items()
        }
        crosses = any(p.device.type != self._average[name].device.type for name, p in parameters.items())
        self._beside = Background(name="average") if crosses else None
        self._copies = HostMemory()
        self._stream = torch.cuda.Stream() if crosses and torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._blended: Future[None] | None = None

    def start_from(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Start from given names and whole, unsharded values instead; those that are not averaged are ignored."""
        missing = set(self._average)
        for name, value in values:
            if name in missing:
                missing.remove(name)
                self._average[name].copy_(part_of(self._parameters[name], value))
        if missing:
            raise AssertionError(f"no value to start from for {', '.join(sorted(missing)[:5])}")

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`; one on the host without waiting, by a stream and a thread."""
        if step % self.every_steps:
            return
        weight = 1.0 if step < self.start_step else 1.0 - self.decay
        weights = {name: local(p) for name, p in self._parameters.items()}
        if self._beside is None:
            self._blend(weights, weight, None)
            return
        self.settle()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = self._copies.take(weights, wait=False)
            self._copied = None if self._stream is None else self._stream.record_event()
        self._blended = self._beside.begin(partial(self._blend, copies, weight, self._copied))

    @torch.no_grad()
    def _blend(self, weights: Mapping[str, Tensor], weight: float, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        averages = list(self._average.values())
        torch._foreach_lerp_(averages, [weights[name].to(torch.float32) for name in self._average], weight)

    def release(self) -> None:
        """Let the device finish copying the weights, before they change; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait for the last update."""
        if self._blended is not None:
            self._blended.result()
            self._blended = None

    @contextmanager
    def swapped(self, roots: Sequence[nn.Module]) -> Iterator[None]:
        """Swap weights and average for the block; both are restored bit for bit.

        Weights of another dtype than the average are kept in one more copy.
        """
        narrow: dict[str, Tensor] = {}
        self._swap(roots, narrow)
        try:
            yield
        finally:
            self._swap(roots, narrow)

    @torch.no_grad()
    def _swap(self, roots: Sequence[nn.Module], narrow: dict[str, Tensor]) -> None:
        reshard(roots)
        self.settle()
        for name, parameter in self._parameters.items():
            shard, average = local(parameter.detach()), self._average[name]
            weights = shard.to(average.device, copy=True)
            shard.copy_(narrow.get(name, average))
            if shard.dtype == average.dtype:
                average.copy_(weights)
            else:
                narrow[name] = weights

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name, sharded like the parameters."""
        self.settle()
        return {name: like(p, self._average[name]) for name, p in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.settle()
        for name, average in self._average.items():
            average.copy_(local(state[name]))
