"""Which storages of tensors live when, operation by operation, of real tensors or of fake ones.

Lives here: the record, and curves of it. Must not live here: what is run while it is made (rehearsal.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cascade_train.distributed.parallelize import local

CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator rounds each storage up to a multiple of this."""


@dataclass(eq=False)
class Part:
    """What begins and ends between two moments, each as its tick from the first on, and its bytes.

    Attributes:
        begin: numbers of its first tick, storage and end; and of operations that were counted before, of samples too.
        length: ticks.
        flops: operations counted, and those of samples.
        inner: storages that begin and end.
        begun: storages that begin and live on: number, tick, bytes.
        ended: storages that were there before and end: number, tick, bytes.
    """

    begin: tuple[int, int, int, int, int]
    length: int = 0
    flops: tuple[int, int] = (0, 0)
    inner: Sequence[tuple[int, int, int]] = ()
    begun: Sequence[tuple[int, int, int]] = ()
    ended: Sequence[tuple[int, int, int]] = ()


class Live(TorchDispatchMode):
    """Records, while the block runs, from which operation to which each storage exists, and counts their arithmetic.

    Attributes:
        label: what storages that begin now belong to.
        counts: whether floating-point operations are counted.
        flops: how many there were, a multiply-add counted as two.
        samples: of the batch that runs, where it divides no size but the batch's, which are told apart by that; None =
            they are not.
        tick: operations so far that made a storage.
    """

    def __init__(self, *, block_bytes: int = 1, run: Callable[[Any, Any, Any], Any] | None = None) -> None:
        """Start empty.

        Args:
            block_bytes: sizes are rounded up to multiples of this.
            run: runs an operation with its arguments; None = as it is.
        """
        super().__init__()
        self.samples: int | None = None
        self._run = run
        self._ticks = False  # whether the next new storage is the first of an operation
        self.label, self.tick = "", 0
        self.counts, self.flops, self._flops_of_samples = False, 0, 0
        self._known_flops: dict[Any, int] = {}  # torch's own count is slower than the operation
        self._block = block_bytes
        self._numbers: dict[int, int] = {}  # of the living storages
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._size: list[int] = []
        self._born: list[int] = []
        self._died: list[int] = []
        self._labels: list[str] = []
        self._ended: list[int] = []  # numbers, as they ended
        self._is_quiet = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that keeps `torch.compile` away from each operation: here nothing is compiled."""
        return False

    def __enter__(self) -> Live:
        """Begin; storages that are resized, as FSDP2's are, are recorded too."""
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = resize(storage, size)
            if storage._cdata in self._numbers:
                self._end(storage._cdata)
                self._begin(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End; what lives on is not recorded any more."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record what it made."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs) if self._run is None else self._run(func, args, kwargs)
        self._ticks = True
        self.note([made] if isinstance(made, Tensor) else made if isinstance(made, tuple | list) else ())
        if self.counts and (count := flop_registry.get(func._overloadpacket)) is not None:
            key = (id(func), *map(_shape, args))
            if key not in self._known_flops:
                self._known_flops[key] = _flops(func, count, args, kwargs, made)
            flops = self._known_flops[key]
            self.flops += flops
            self._flops_of_samples += flops if self.samples is not None and flops % self.samples == 0 else 0
        return made

    def note(self, values: Iterable[Any]) -> None:
        """Record the storages of the tensors among some values, each once; of a DTensor, this rank's part."""
        for value in values:
            if isinstance(value, Tensor) and (storage := local(value).untyped_storage())._cdata not in self._numbers:
                self._begin(storage)

    def _begin(self, storage: torch.UntypedStorage) -> None:
        self.tick += self._ticks and not self._is_quiet
        self._ticks = False
        key = storage._cdata
        self._ends[key] = weakref.ref(storage, lambda _: self._end(key))
        self._numbers[key] = self._add(storage.nbytes(), self.tick, -1)

    def _end(self, key: int) -> None:
        number = self._numbers.pop(key)
        self._died[number] = self.tick + 1
        self._ended.append(number)
        del self._ends[key]

    def begin_part(self, *, quiet: bool = False) -> Part:
        """Begin a part; `quiet`: time stands still in it, until `copy_part` ends it."""
        self._is_quiet = quiet
        return Part(begin=(self.tick, len(self._size), len(self._ended), self.flops, self._flops_of_samples))

    def end_part(self, part: Part) -> Part:
        """Return a part with what began and ended in it."""
        tick, first, ends, flops, of_samples = part.begin
        new = range(first, len(self._size))
        part.length = self.tick - tick
        part.flops = self.flops - flops, self._flops_of_samples - of_samples
        part.inner = [(self._born[n] - tick, self._died[n] - tick, self._size[n]) for n in new if self._died[n] >= 0]
        part.begun = [(n, self._born[n] - tick, self._size[n]) for n in new if self._died[n] < 0]
        part.ended = [(n, self._died[n] - tick, self._size[n]) for n in self._ended[ends:] if n < first]
        return part

    def copy_part(self, known: Part, part: Part, waiting: Sequence[int]) -> list[int] | None:
        """End a quiet part as if what is known of another had happened in it; None where it does not fit.

        `waiting` are storages that do not exist, made by an earlier copy, and end in this one; returned are those that
        this one makes, since the other's live on.
        """
        tick, first, ends, flops, of_samples = part.begin
        self._is_quiet = False
        began = [n for n in range(first, len(self._size)) if self._died[n] < 0]
        ended = [n for n in self._ended[ends:] if n < first] + list(waiting)
        for number in range(first, len(self._size)):
            if self._died[number] >= 0:
                self._size[number] = 0
        begun, gone = _by_size(known.begun), _by_size(known.ended)
        for numbers, times, places in ((began, self._born, begun), (ended, self._died, gone)):
            for number in numbers:
                if not places.get(self._size[number]):
                    return None
                times[number] = tick + places[self._size[number]].pop()
        if any(gone.values()):
            return None
        self.tick = tick + known.length
        self.flops, self._flops_of_samples = flops + known.flops[0], of_samples + known.flops[1]
        for born, died, size in known.inner:
            self._add(size, tick + born, tick + died)
        return [self._add(size, tick + born, -1) for size, places in begun.items() for born in places]

    def _add(self, size: int, born: int, died: int) -> int:
        self._size.append(size)
        self._born.append(born)
        self._died.append(died)
        self._labels.append(self.label)
        return len(self._size) - 1

    def relabel(self, old: str, new: str) -> None:
        """Let what lives now under one label belong to another."""
        for number in self._numbers.values():
            if self._labels[number] == old:
                self._labels[number] = new

    def flops_of_samples(self) -> tuple[float, float]:
        """Return how many of `flops` each of the `samples` took, and how many are of no sample, as an optimizer's."""
        assert self.samples is not None
        return self._flops_of_samples / self.samples, float(self.flops - self._flops_of_samples)

    def curves(self, begin: int, samples: int | None = None) -> dict[str, np.ndarray]:
        """Return the bytes that live when each operation from number `begin` on has ended, (T,) int64 by label.

        What an operation frees lives with what it makes. `samples`: as if the batch had so many; None = as it was.
        """
        end = self.tick + 2
        size, born, died = (np.array(values, dtype=np.int64) for values in (self._size, self._born, self._died))
        if samples is not None and self.samples is not None:
            size = np.where(size % self.samples == 0, size // self.samples * samples, size)
        size = -(-size // self._block) * self._block
        died = np.where(died < 0, end, died)
        labels = np.array(self._labels)
        found = {}
        for label in dict.fromkeys(self._labels):
            mine = labels == label
            change = np.bincount(born[mine], size[mine], end + 1) - np.bincount(died[mine], size[mine], end + 1)
            found[label] = change.cumsum().astype(np.int64)[begin : self.tick + 1]
        return found


def _by_size(storages: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Return the ticks of storages by their bytes, the last one last."""
    found: dict[int, list[int]] = {}
    for _, tick, size in storages:
        found.setdefault(size, []).append(tick)
    return {size: sorted(ticks) for size, ticks in found.items()}


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else tuple(value) if isinstance(value, list) else value


def _flops(func: Any, count: Any, args: Any, kwargs: Any, made: Any) -> int:
    if func._overloadpacket is not torch.ops.aten.convolution_backward:
        return int(count(*args, **kwargs, out_val=made))
    gradient, picture, weight, *_, transposed, _, _, mask = args  # torch's own formula takes groups for dense
    places = picture if transposed else gradient
    return 2 * places.numel() * weight[0].numel() * (mask[0] + mask[1])
