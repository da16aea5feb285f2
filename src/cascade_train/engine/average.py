"""Running averages of the weights, on their device or on the host: one that can be swapped in, others that are kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from cascade_train.distributed.parallelize import like, local, part_of, reshard
from cascade_train.engine.checkpoint.writing import Background, HostMemory
from cascade_train.engine.power_function import decay_at, exponent_of


class RunningAverages(ABC):
    """Averages in fp32 of named parameters: average <- (1 - share) * average + share * weights, every `every_steps`.

    `parameters` are already sharded, and `device` is that of the `count` averages; None = that of the weights.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, count: int, device: torch.device | None, every_steps: int = 1
    ) -> None:
        self.every_steps = every_steps
        self._parameters = dict(parameters)
        self._averages = [
            {
                name: local(p.detach()).to(device=device or p.device, dtype=torch.float32, copy=True)
                for name, p in parameters.items()
            }
            for _ in range(count)
        ]
        crosses = device is not None and any(p.device.type != device.type for p in parameters.values())
        self._beside = Background(name="average") if crosses else None
        self._copies = HostMemory()
        self._stream = torch.cuda.Stream() if crosses and torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._blended: Future[None] | None = None

    @abstractmethod
    def shares(self, step: int) -> Sequence[float]:
        """Share of the weights after optimizer step `step` in each average."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update after optimizer step `step`. A stream and a thread update averages on the host, without waiting."""
        if step % self.every_steps:
            return
        shares = self.shares(step)
        weights = {name: local(p) for name, p in self._parameters.items()}
        if self._beside is None:
            self._blend(weights, shares)
            return
        self.settle()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = self._copies.take(weights, wait=False)
            self._copied = None if self._stream is None else self._stream.record_event()
        self._blended = self._beside.begin(partial(self._blend, copies, shares))

    @torch.no_grad()
    def _blend(self, weights: Mapping[str, Tensor], shares: Sequence[float]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        wide = [weights[name].to(torch.float32) for name in self._parameters]
        for average, share in zip(self._averages, shares, strict=True):
            torch._foreach_lerp_(list(average.values()), wide, share)

    def release(self) -> None:
        """Let the device finish copying the weights, before they change; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait for the last update."""
        if self._blended is not None:
            self._blended.result()
            self._blended = None

    def _sharded(self, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: like(p, average[name]) for name, p in self._parameters.items()}

    def _restore(self, average: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, value in average.items():
            value.copy_(local(state[name]))


class Ema(RunningAverages):
    """A running average; before `start_step` it is a plain copy.

    As Stable Cascade, train/base.py, which counts micro-batches instead. With `ramp`, update n, counted from 0, has a
    decay of at most (1 + n) / (10 + n), as in diffusers' `EMAModel`, so that a short run forgets its first weights.

    Attributes:
        updates: how many there were so far, copies not counted.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        decay: float,
        start_step: int,
        every_steps: int,
        device: torch.device | None,
        ramp: bool = False,
    ) -> None:
        super().__init__(parameters, count=1, every_steps=every_steps, device=device)
        self.decay = decay
        self.start_step = start_step
        self.ramp = ramp
        self.updates = 0
        (self._average,) = self._averages

    def shares(self, step: int) -> Sequence[float]:
        """Share of the weights after optimizer step `step`; counts the update."""
        if step < self.start_step:
            return [1.0]
        self.updates += 1
        return [1.0 - self.decay_at(self.updates - 1)]

    def decay_at(self, update: int) -> float:
        """Weight of the old average in an update, counted from 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.ramp else self.decay

    def updates_until(self, last: int, *, after: int = 0, first: int = 1) -> int:
        """Updates in all after optimizer step `last`, if `after` steps are taken and weights train from `first` on."""
        begin = max(self.start_step, first, after + 1)
        return self.updates + max(last // self.every_steps - (begin - 1) // self.every_steps, 0)

    def trained_share(self, updates: int) -> float:
        """Share that weights after the start of the average have in it after so many updates."""
        return 1.0 - math.prod(self.decay_at(update) for update in range(updates))

    def start_from(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Start from given names and whole, unsharded values instead; those that are not averaged are ignored."""
        missing = set(self._average)
        for name, value in values:
            if name in missing:
                missing.remove(name)
                self._average[name].copy_(part_of(self._parameters[name], value))
        if missing:
            raise AssertionError(f"no value to start from for {', '.join(sorted(missing)[:5])}")

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
        """Average by parameter name, sharded like the parameters."""
        self.settle()
        return self._sharded(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.settle()
        self._restore(self._average, state)


class PowerFunctionAverages(RunningAverages):
    """Running averages of several lengths with power-function profiles, which checkpoints keep (power_function.py).

    They forget where training began: the first update takes the weights whole.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, lengths: Sequence[float], device: torch.device | None
    ) -> None:
        super().__init__(parameters, count=len(lengths), device=device)
        self.lengths = tuple(lengths)
        self._exponents = [exponent_of(length) for length in lengths]

    def shares(self, step: int) -> Sequence[float]:
        """Share of the weights after optimizer step `step` in the average of each length."""
        return [1.0 - decay_at(exponent, step) for exponent in self._exponents]

    @torch.no_grad()
    def add_to(self, total: dict[str, Tensor], coefficients: Sequence[float]) -> None:
        """Add the averages, each times its coefficient, to this rank's parts of a sum, by parameter name."""
        self.settle()
        for average, coefficient in zip(self._averages, coefficients, strict=True):
            for name, value in average.items():
                total[name] = total[name].add_(value, alpha=coefficient) if name in total else value * coefficient

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Each average by its length and parameter name, sharded like the parameters."""
        self.settle()
        return {str(each): self._sharded(value) for each, value in zip(self.lengths, self._averages, strict=True)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned."""
        self.settle()
        for length, average in zip(self.lengths, self._averages, strict=True):
            self._restore(average, state[str(length)])
