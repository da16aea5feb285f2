"""What operations make of tensors without memory, remembered: networks repeat few shapes many times.

torch computes most results' shapes in Python, a millisecond each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

META = torch.device("meta")

Spec = tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None
"""Size, stride and dtype of a result; or a result that is no tensor."""

IN_PLACE: list[Spec] = []
"""Of an operation whose result is its first argument, changed in place."""


class Shapes:
    """Runs operations on the meta device; those that make new tensors of known inputs are not run again."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[bool, list[Spec]]] = {}
        self._refused: set[Any] = set()  # they return their inputs' memory, change it, or make something else

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation returns."""
        if func in self._refused:
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
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
        if args and made is args[0] and _key(made) == key[1][0]:
            self._known[key] = True, IN_PLACE
            return
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        is_plain = isinstance(made, Tensor | tuple) and all(_is_new(each, inputs) for each in results)
        if func._schema.is_mutable or not is_plain:
            self._refused.add(func)
        else:
            specs = [(r.shape, r.stride(), r.dtype) if isinstance(r, Tensor) else r for r in results]
            self._known[key] = isinstance(made, Tensor), specs


def _made(spec: Spec) -> Any:
    return torch.empty_strided(spec[0], spec[1], dtype=spec[2], device=META) if isinstance(spec, tuple) else spec


def _is_new(result: Any, inputs: set[int]) -> bool:
    if not isinstance(result, Tensor):
        return result is None or isinstance(result, int)
    return result.is_meta and result.untyped_storage()._cdata not in inputs


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
