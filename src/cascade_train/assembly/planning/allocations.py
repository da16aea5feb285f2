"""Record which storages are allocated during which operations, of real tensors or of ones on the meta device.

Lives here: the record, bytes over time, and a cache of the shapes that operations on the meta device make. Must not
live here: what runs meanwhile (memory_trace.py).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from cascade_train.distributed.parallelize import local

META = torch.device("meta")

CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator rounds each storage up to a multiple of this."""

Spec = tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None
"""Size, stride and dtype of a result; or a result that is no tensor."""


class ShapeCache(TorchDispatchMode):
    """Runs operations; those that make new tensors on the meta device of inputs seen before are not run again.

    Networks repeat few shapes many times, and torch computes most results' shapes in Python, a millisecond each. The
    value of a tensor without memory is 1 where an optimizer reads it, as it is in a step that changes weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cached: dict[Any, Callable[[Any], Any]] = {}
        self._refused: set[int] = set()  # ids of operations that return their inputs' memory, or change it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Omit the wrapper that keeps `torch.compile` away from each operation: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operation returns."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operation returns."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if id(func) in self._refused:
            return func(*args, **kwargs)
        key = (id(func), _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        if (again := self._cached.get(key)) is not None:
            return again(args)
        made = func(*args, **kwargs)
        results = [made] if isinstance(made, Tensor) else made
        if args and made is args[0] and made.is_meta and _key(made) == key[1][0]:
            self._cached[key] = itemgetter(0)  # changed in place
        elif func._schema.is_mutable or _storages(args) & _storages(made):
            self._refused.add(id(func))
        elif isinstance(made, Tensor | tuple) and all(map(_is_cacheable, results)):
            specs = [(r.shape, r.stride(), r.dtype) if isinstance(r, Tensor) else r for r in results]
            self._cached[key] = partial(_allocate, specs, isinstance(made, Tensor))
        return made


def _allocate(specs: list[Spec], is_single: bool, args: Any) -> Any:
    results = [
        torch.empty_strided(spec[0], spec[1], dtype=spec[2], device=META) if isinstance(spec, tuple) else spec
        for spec in specs
    ]
    return results[0] if is_single else tuple(results)


def _storages(values: Any) -> set[int]:
    return {value.untyped_storage()._cdata for value in tree_iter(values) if isinstance(value, Tensor)}


def _is_cacheable(result: Any) -> bool:
    return result.is_meta if isinstance(result, Tensor) else result is None or isinstance(result, int)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


@dataclass(slots=True)
class _Record:
    """A storage: bytes, label, and the ticks of its allocation and its end."""

    bytes: int
    label: str
    born: int
    died: int | None = None


class Allocations(TorchDispatchMode):
    """Records from which operation to which each storage is allocated while the block runs; counts FLOPs.

    Attributes:
        label: what storages that are allocated now are for.
        counts_flops: whether floating-point operations are counted.
        flops: their number, a multiply-add counted as two.
        tick: operations so far that allocated a storage.
    """

    def __init__(self, *, block_bytes: int = 1, shapes: ShapeCache | None = None) -> None:
        """Start empty.

        Args:
            block_bytes: sizes are rounded up to multiples of it.
            shapes: runs the operations; None = they run as they are.
        """
        super().__init__()
        self._block, self._shapes = block_bytes, shapes
        self._operation: Any = None  # runs now, and has allocated no storage yet
        self._operations: list[Any] = [None]  # of each tick; None = before the first
        self.label, self.tick = "", 0
        self.counts_flops, self.flops = False, 0
        self._records: list[_Record] = []
        self._allocated: dict[int, tuple[_Record, weakref.ref[Any]]] = {}  # by the storage's address

    _should_skip_dynamo = ShapeCache._should_skip_dynamo

    def __enter__(self) -> Allocations:
        """Begin; storages that are resized, as FSDP2's are, are recorded too."""
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = resize(storage, size)
            if storage._cdata in self._allocated:
                self._end(storage._cdata)
                self._begin(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End; nothing is recorded any more."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record what it made."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs) if self._shapes is None else self._shapes.run(func, args, kwargs)
        self._operation = func
        self.record([made] if isinstance(made, Tensor) else made if isinstance(made, tuple | list) else ())
        if self.counts_flops and (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += _flops(func, count, args, kwargs, made)
        return made

    def record(self, values: Iterable[Any]) -> None:
        """Record the storages of tensors, each once; of a DTensor, this rank's part."""
        for value in values:
            if isinstance(value, Tensor) and (storage := local(value).untyped_storage())._cdata not in self._allocated:
                self._begin(storage)

    def _begin(self, storage: torch.UntypedStorage) -> None:
        if self._operation is not None:
            self.tick += 1
            self._operations.append(self._operation)
            self._operation = None
        key, record = storage._cdata, _Record(storage.nbytes(), self.label, self.tick)
        self._records.append(record)
        self._allocated[key] = record, weakref.ref(storage, lambda _: self._end(key))

    def _end(self, key: int) -> None:
        self._allocated.pop(key)[0].died = self.tick + 1

    def relabel(self, old: str, new: str) -> None:
        """Change the label of storages that are allocated now."""
        for record, _ in self._allocated.values():
            if record.label == old:
                record.label = new

    def operations(self, begin: int) -> list[Any]:
        """Operation of each moment of `curves`; None = what was before the first."""
        return self._operations[begin : self.tick + 1]

    def curves(self, begin: int) -> dict[str, np.ndarray]:
        """Bytes allocated when each operation from number `begin` on has ended, (T,) int64 by label.

        What an operation frees still counts during it.
        """
        end = self.tick + 2
        changes: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(end + 1, dtype=np.int64))
        for record in self._records:
            size, change = -(-record.bytes // self._block) * self._block, changes[record.label]
            change[record.born] += size
            change[end if record.died is None else record.died] -= size
        return {label: change.cumsum()[begin : self.tick + 1] for label, change in changes.items()}


def _flops(func: Any, count: Any, args: Any, kwargs: Any, made: Any) -> int:
    if func._overloadpacket is not torch.ops.aten.convolution_backward:
        return int(count(*args, **kwargs, out_val=made))
    gradient, image, weight, *_, transposed, _, _, mask = args  # torch's own formula takes groups for dense
    positions = image if transposed else gradient
    return 2 * positions.numel() * weight[0].numel() * (mask[0] + mask[1])
