"""The exponential moving average of trainable weights, on their shards, by optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cascade_train.distributed.parallelize import like, local, reshard


class Ema:
    """A running average in fp32 of named parameters.

    ema <- decay * ema + (1 - decay) * weights, every `every_steps` optimizer steps; before `start_step` the
    average is a plain copy (Stable Cascade, train/base.py, which counts micro-batches instead).

    Args:
        parameters: the trainable parameters, by name, already sharded; their shards are copied.
        decay: in [0, 1).
        start_step: first optimizer step at which the average is more than a copy.
        every_steps: optimizer steps between updates.
        device: where the average lives; None = beside the weights.
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

    def start_from(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Start from given names and whole, unsharded values instead; those that are not averaged are ignored.

        Raises:
            AssertionError: a parameter is not among them.
        """
        missing = set(self._average)
        for name, value in values:
            if name in missing:
                missing.remove(name)
                self._average[name].copy_(_own_shard(self._parameters[name], value))
        if missing:
            raise AssertionError(f"no value to start from for {', '.join(sorted(missing)[:5])}")

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step`."""
        if step % self.every_steps:
            return
        averages = list(self._average.values())
        weights = [
            local(p.detach()).to(device=a.device, dtype=torch.float32)
            for a, p in zip(averages, self._parameters.values(), strict=True)
        ]
        weight = 1.0 if step < self.start_step else 1.0 - self.decay
        torch._foreach_lerp_(averages, weights, weight)

    @contextmanager
    def swapped(self, roots: Sequence[nn.Module]) -> Iterator[None]:
        """Swap weights and average for the block; both are restored bit for bit."""
        self._swap(roots)
        try:
            yield
        finally:
            self._swap(roots)

    @torch.no_grad()
    def _swap(self, roots: Sequence[nn.Module]) -> None:
        reshard(roots)
        for name, parameter in self._parameters.items():
            shard, average = local(parameter.detach()), self._average[name]
            kept = shard.to(device=average.device, dtype=average.dtype, copy=True)
            shard.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name, sharded like the parameters."""
        return {name: like(p, self._average[name].to(p.device)) for name, p in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, average in self._average.items():
            average.copy_(local(state[name]))


def _own_shard(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor that every rank has, without communication."""
    if not isinstance(parameter, DTensor):
        return value
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
