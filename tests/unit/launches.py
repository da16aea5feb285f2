"""Counts what the host would launch on a GPU, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("detach", "empty", "empty_like", "new_empty")


class Launches(TorchDispatchMode):
    """Lists the operators that run and are no view and no allocation; `parts`: what runs for an operator of ours."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._parts = parts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in self._parts:
            with self:
                return self._parts[name](*args)
        if not func.is_view and name not in ALLOCATIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
