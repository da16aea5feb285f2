"""A device made of tensors on the host, which notes what makes the host of a real one wait. No GPU is needed.

It is torch's Python backend: a `Pretended` tensor has its numbers in a CPU tensor, and says that it is on `pretend:0`.
Noted are, with the lines of the library that caused them: waits (`.item()`, a boolean index, a branch on a value),
copies between host and device, and operations on tensors of both. Not seen: what the library does on CUDA alone, such
as pinned memory, streams and kernels of its own. In a process that imports this, torch has an accelerator from then on.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
torch.pretend.get_rng_state = lambda _=None: torch.get_rng_state()  # type: ignore[attr-defined]
torch.pretend.set_rng_state = lambda state, _=None: torch.set_rng_state(state)  # type: ignore[attr-defined]

DEVICE = torch.device("pretend", 0)
WAITS = {
    *("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero"),
    *("aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
    *("aten::repeat_interleave.Tensor", "aten::bincount"),
}
INDEXED = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::_to_copy", "aten::copy_"}
CROSSING = {*COPIES, "aten::set_", "aten::_has_compatible_shallow_copy_type"}

SEEN: Counter[tuple[str, str, str]] = Counter()
"""How often: (wait, mix, or a copy to_device or to_host, with _blocking where it is), the operation, and where."""


def where() -> str:
    """Return the innermost two lines of the library, or of these tests, that led here; else of anything."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    ours = [f.partition(root)[2] for f in frames for root in ("src/cascade_train/", "tests/pretended/") if root in f]
    return " < ".join([f for f in ours if not f.startswith("device.py")][:2] or frames[:2])


def note(kind: str, operation: str) -> None:
    SEEN[kind, operation, where()] += 1


class Pretended(torch.Tensor):
    """A tensor on the device: `raw` has its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Pretended:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=DEVICE, requires_grad=False, **layout)
        made.raw = raw
        return made

    def __repr__(self) -> str:
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        note("wait", "tolist")
        return self.raw.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert pretend:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors of the host, note what it would cost, and say where its result is."""
    name, tensors = func.name(), [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, Pretended)]
    if ours and name.startswith("aten::"):
        note_cost(name, args, tensors)
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if wanted == "pretend":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name in ("aten::_pin_memory", "aten::pin_memory"):
        return args[0]
    if name in COPIES:
        note_copy(name, args, kwargs, wanted)
    raw_args, raw_kwargs = tree_map_only(Pretended, lambda each: each.raw, (args, {**kwargs, "pin_memory": False}))
    if "pin_memory" not in kwargs:
        del raw_kwargs["pin_memory"]
    out = func(*raw_args, **raw_kwargs)
    if name == "aten::copy_":
        return args[0]
    if wanted == "meta" or not (wanted == "pretend" or (wanted is None and ours)):
        return out
    same = {id(each.raw): each for each in ours} if func._schema.is_mutable else {}
    same |= {id(each): each for each in tensors if func._schema.is_mutable}
    return tree_map_only(torch.Tensor, lambda each: same[id(each)] if id(each) in same else Pretended(each), out)


def note_cost(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """Note a wait, and tensors of the host beside those of the device; numbers, and indices, may come from the host."""
    if name in WAITS:
        note("wait", name)
    for index in args[1] if name in INDEXED else ():
        if isinstance(index, Pretended) and index.dtype in (torch.bool, torch.uint8):
            note("wait", f"{name} by a mask")
    for each in tensors if name not in CROSSING else ():
        if not isinstance(each, Pretended) and each.dim() > 0:
            note("to_device_blocking" if name in INDEXED and each.device.type == "cpu" else "mix", name)


def note_copy(name: str, args: Any, kwargs: dict[str, Any], wanted: str | None) -> None:
    """Note a copy between host and device."""
    source, target = (args[0], wanted) if name == "aten::_to_copy" else (args[1], args[0].device.type)
    non_blocking = kwargs.get("non_blocking", False) or (name == "aten::copy_" and len(args) > 2 and args[2])
    note_crossing(name, source.device.type, source.device.type if target is None else target, bool(non_blocking))


def note_crossing(name: str, source: str, target: str, non_blocking: bool) -> None:
    if (source == "pretend") != (target == "pretend") and "meta" not in (source, target):
        note(f"to_{'device' if target == 'pretend' else 'host'}{'' if non_blocking else '_blocking'}", name)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy for torch.tensor(…, device=)."""
    note_crossing("aten::_copy_from", source.device.type, target.device.type, non_blocking)
    raw = [each.raw if isinstance(each, Pretended) else each for each in (source, target)]
    raw[1].copy_(raw[0])
    return target


LIBRARY = torch.library.Library("aten", "IMPL")
ATEN = torch.ops.aten
for operation in (ATEN.empty.memory_format, ATEN.empty_strided.default, ATEN.silu_backward.default):
    LIBRARY.impl(operation.name(), lambda *args, _op=operation, **kwargs: run(_op, args, kwargs), "PrivateUse1")
LIBRARY.impl("aten::_copy_from", copy_from, "PrivateUse1")
