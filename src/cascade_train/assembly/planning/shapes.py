"""What operations make of tensors without memory, remembered: networks repeat few shapes many times.

torch computes most results' shapes in Python, a millisecond each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

Spec = tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None
"""Size, stride and dtype of a result; or a result that is no tensor."""

IN_PLACE: list[Spec] = []
"""Of an operation whose result is its first argument, changed in place."""


class Shapes:
    """Runs operations on the meta device; those that make new tensors of known inputs are not run again.

    The value of a tensor without memory is 1 where an optimizer asks for it, as it is in a step that changes weights.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[bool, list[Spec]]] = {}
        self._refused: set[int] = set()  # ids of operations that return their inputs' memory, or change it

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation returns."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if id(func) in self._refused:
            return func(*args, **kwargs)
        try:
            key = (id(func), _key(args), _key(tuple(kwargs.items())) if kwargs else ())
            found = self._known.get(key)
        except TypeError:  # an argument that has no hash
            return func(*args, **kwargs)
        if found is None:
            made = func(*args, **kwargs)
            self._remember(func, key, made, args)
            return made
        is_single, specs = found
        if specs is IN_PLACE:
            return args[0]
        results = [_made(spec) for spec in specs]
        return results[0] if is_single else tuple(results)

    def _remember(self, func: Any, key: Any, made: Any, args: Any) -> None:
        results = [made] if isinstance(made, Tensor) else made
        if args and made is args[0] and made.is_meta and _key(made) == key[1][0]:
            self._known[key] = True, IN_PLACE
            return
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        if func._schema.is_mutable or any(tensor.untyped_storage()._cdata in inputs for tensor in _tensors([made])):
            self._refused.add(id(func))
        elif isinstance(made, Tensor | tuple) and all(map(_is_plain, results)):
            specs = [(r.shape, r.stride(), r.dtype) if isinstance(r, Tensor) else r for r in results]
            self._known[key] = isinstance(made, Tensor), specs


class Running(TorchDispatchMode):
    """Runs the operations of a block by `Shapes`."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self._shapes = shapes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Live`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what an operation returns."""
        return self._shapes.run(func, args, kwargs or {})


def _made(spec: Spec) -> Any:
    return torch.empty_strided(spec[0], spec[1], dtype=spec[2], device=META) if isinstance(spec, tuple) else spec


def _is_plain(result: Any) -> bool:
    """Return whether a result is a tensor without memory, or no tensor at all."""
    return result.is_meta if isinstance(result, Tensor) else result is None or isinstance(result, int)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value
