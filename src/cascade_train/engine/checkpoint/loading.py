"""Reading torch's distributed checkpoints so that nothing in a file can run code.

A checkpoint's table of contents and its plain values are pickles: the first is read by an allow-list of classes, the
others as weights. Sizes and hashes are compared before, by the manifest.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from cascade_train.distributed.consensus import from_every_rank
from cascade_train.engine.checkpoint.folder import Manifest, find_fault
from cascade_train.engine.checkpoint.writing import first_failure
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.untrusted import open_regular

TABLE_NAME = ".metadata"
"""The table of contents, as torch calls it."""

_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Classes without effects, of which a table of contents consists, beside dtypes."""


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_table(path: Path, manifest: Manifest) -> Metadata:
    """A checkpoint's table of contents; a RunError if it is missing or could run code."""
    table: Metadata
    try:
        with open_regular(path / TABLE_NAME) as file:
            table = _TableUnpickler(file).load()
    except FileNotFoundError as error:
        raise RunError(f"the checkpoint {path} has no table of contents ({TABLE_NAME})") from error
    except Exception as error:  # a pickle that was tampered with may raise anything
        is_named = isinstance(error, pickle.UnpicklingError)
        newer = "" if is_named else f" Unless a newer torch than {torch.__version__} has written it:"
        raise RunError(
            f"{path / TABLE_NAME} is refused: {error}.{newer} It is no table of contents of a checkpoint: do not use "
            "this file, whoever made it may have meant harm"
        ) from error
    names = {info.relative_path for info in table.storage_data.values()} if isinstance(table, Metadata) else {None}
    if not names <= manifest.files.keys():
        raise RunError(f"{path / TABLE_NAME} is refused: it names files that the manifest does not know")
    return table


def optimizer_keys(table: Metadata) -> frozenset[str]:
    """Flat keys of the optimizers' state, `phases.<name>.optimizer` of engine/phase.py."""
    return frozenset(key for key, path in table.planner_data.items() if _is_of_optimizer(path))


def _is_of_optimizer(path: Sequence[Any]) -> bool:
    return path[0] == "phases" and "optimizer" in path[2:3]


def follow_groups(state: dict[str, Any], table: Metadata) -> None:
    """Give `state` the checkpoint's parameter groups, if these divide the same weights otherwise.

    That is so after a change of decay, or of a root's own learning rate. An algorithm may have groups of several kinds,
    by what they keep; other kinds are of another algorithm, and are refused later.
    """
    stored: dict[str, dict[Any, dict[Any, None]]] = defaultdict(lambda: defaultdict(dict))
    for path in (table.planner_data or {}).values():
        if path[0] == "phases" and path[2:4] == ("optimizer", "param_groups") and len(path) == 6:
            stored[path[1]][path[4]][path[5]] = None
    for name, phase in state.get("phases", {}).items():
        ours, theirs = phase.get("optimizer", {}).get("param_groups", []), stored.get(name, {})
        kinds = {  # with a tensor to read each tensor into; plain values are replaced
            frozenset(group): {k: torch.empty_like(v) if isinstance(v, Tensor) else None for k, v in group.items()}
            for group in ours
        }
        if ours and kinds.keys() == {frozenset(group) for group in theirs.values()}:
            phase["optimizer"]["param_groups"] = [
                copy.deepcopy(kinds[frozenset(theirs[place])]) for place in sorted(theirs)
            ]


def follow_states(state: dict[str, Any], table: Metadata) -> None:
    """Leave out of `state` what an optimizer keeps of a weight, where it keeps nothing of that in the checkpoint.

    So it is with a weight that no gradient had reached. Where a phase has nothing at all there, that is refused later.
    """
    stored = {path[:5] for path in (table.planner_data or {}).values() if _is_of_optimizer(path)}
    for name, phase in state.get("phases", {}).items():
        for kind in ("state", "weights"):
            begin, held = ("phases", name, "optimizer", kind), phase.get("optimizer", {}).get(kind, {})
            if any(path[:4] == begin for path in stored):
                for weight in [each for each in held if (*begin, each) not in stored]:
                    del held[weight]


class _TableReader(FileSystemReader):
    def __init__(self, path: Path, table: Metadata) -> None:
        super().__init__(path)
        self._table = table

    def read_metadata(self) -> Metadata:
        return self._table


class _ExactLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose keys, shapes or dtypes are not exactly those asked for."""

    def __init__(self, path: Path, ignored: frozenset[str]) -> None:
        super().__init__()
        self._path = path
        self._ignored = ignored

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        contents = self.metadata.state_dict_metadata
        saved = {key: _describe(entry) for key, entry in contents.items() if key not in self._ignored}
        wanted = {key: _describe(value) for key, value in self.state_dict.items()}
        differing = sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
        if differing:
            key = differing[0]
            paths = {**(self.metadata.planner_data or {}), **self.mappings}
            kind = "optimizer" if all(_is_of_optimizer(paths.get(each, ("",))) for each in differing) else "model"
            raise ConfigError(
                f"{self._path} is a checkpoint of another {kind}: {key} is {saved.get(key, 'absent')} there and "
                f"{wanted.get(key, 'absent')} in this run ({len(differing)} keys differ). Remedy: start with the "
                "model, task and optimizer of its run's config.yaml, or a new run with run.name=<new name>"
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise RunError(
                f"{key} in {self._path} is refused: it is more than a plain value, and could run code when it is read. "
                "Do not use this file, whoever made it may have meant harm"
            ) from error
        *parents, last = self.mappings[key]
        container: Any = self.original_state_dict
        for name in parents:
            container = container[name]
        container[last] = loaded


def load_files(path: Path, manifest: Manifest, state: dict[str, Any], *, optimizer: bool) -> None:
    """Fill `state` in place from a checkpoint. Collective. See `CheckpointStore.load`."""
    tables: list[Metadata] = []
    from_every_rank(lambda: tables.append(read_table(path, manifest)))
    follow_groups(state, tables[0])
    follow_states(state, tables[0])
    planner = _ExactLoadPlanner(path, frozenset() if optimizer else optimizer_keys(tables[0]))
    try:
        state_dict_loader.load(state, storage_reader=_TableReader(path, tables[0]), planner=planner)
    except CheckpointException as error:
        first = first_failure(error)
        if isinstance(first, ConfigError | RunError):
            raise type(first)(str(first)) from error
        raise RunError(f"the checkpoint {path} could not be loaded: {first!r}") from error


def load_entry(path: Path, table: Metadata, key: str) -> Any:
    """One entry of a checkpoint, a tensor or a plain value, whatever ranks have saved it."""
    entry = table.state_dict_metadata[key]
    state: dict[str, Any] = {key: None}
    if isinstance(entry, TensorStorageMetadata):
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = _ExactLoadPlanner(path, frozenset(table.state_dict_metadata) - {key})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        state_dict_loader.load(state, storage_reader=_TableReader(path, table), planner=planner, no_dist=True)
    return state[key]


def _describe(entry: object) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"{entry.properties.dtype} {tuple(entry.size)}"
    if isinstance(entry, Tensor):
        return f"{entry.dtype} {tuple(entry.shape)}"
    return "a plain value"


def tensor_differences(paths: tuple[Path, Path], manifests: tuple[Manifest, Manifest]) -> Iterator[str]:
    """Yield how each entry of two checkpoints differs, the optimizers' last."""
    for path in paths:
        if fault := find_fault(path):
            raise RunError(f"{path} cannot be compared, because it is damaged: {fault}")
    tables = [read_table(path, manifest) for path, manifest in zip(paths, manifests, strict=True)]
    last = optimizer_keys(tables[0]) | optimizer_keys(tables[1])
    keys = dict.fromkeys([*tables[0].state_dict_metadata, *tables[1].state_dict_metadata])
    for key in sorted(keys, key=last.__contains__):
        missing = [path for path, table in zip(paths, tables, strict=True) if key not in table.state_dict_metadata]
        if missing:
            yield f"{key}: not in {missing[0]}"
            continue
        line = _difference(*(load_entry(path, table, key) for path, table in zip(paths, tables, strict=True)))
        if line is not None:
            yield f"{key}: {line}"


def _difference(one: Any, other: Any) -> str | None:
    """How two entries of a checkpoint differ; None = not."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None if type(one) is type(other) and one == other else f"{one} and {other}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if torch.equal(one, other):
        return None
    off = (one != other) & ~((one != one) & (other != other))  # NaN beside NaN is equal
    if not off.any():
        return None
    norm = float(one.double().norm())
    apart = float((one.double() - other.double()).norm())
    relative = f", {apart / norm:.1e} of its norm" if norm > 0 and math.isfinite(apart) else ""
    return f"{int(off.sum()):,} of {one.numel():,} values{relative}"
