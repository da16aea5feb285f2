"""Dropping the optimizer state of a checkpoint that stays for its weights: what is left is copied byte by byte.

Which checkpoints lose it is decided by the retention rule or by whoever prunes.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cascade_train.engine.checkpoint.folder import CheckpointFolder
from cascade_train.engine.checkpoint.loading import TABLE_NAME, optimizer_keys, read_table
from cascade_train.engine.checkpoint.manifest import find_fault, hash_file, read_manifest, write_manifest
from cascade_train.errors import RunError

_BLOCK = 2**24


def drop_optimizer(folder: CheckpointFolder, step: int) -> int:
    """Rewrite a checkpoint without the optimizers' state, in one step as anything else; return the bytes freed.

    Args:
        folder: where it lies.
        step: of a checkpoint that is complete and has the state.

    Raises:
        OSError: the disk is full or failed; the checkpoint is as it was.
        RunError: the checkpoint is damaged: a copy would hide it.
    """
    path, hidden = folder.path(step), folder.hidden(step, "slimming")
    fault = find_fault(path)
    if fault is not None:
        raise RunError(f"{path} keeps its optimizer state, because it is damaged: {fault}")
    manifest = read_manifest(path)
    table = read_table(path, manifest)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        _write_table(hidden / TABLE_NAME, _copy_rest(path, hidden, table, optimizer_keys(table)))
        files = {each.name: hash_file(each) for each in sorted(hidden.iterdir())}
        write_manifest(hidden, dataclasses.replace(manifest, files=files, has_optimizer=False))
        folder.publish(hidden, step)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return sum(each.size for each in manifest.files.values()) - sum(each.size for each in files.values())


def _copy_rest(path: Path, hidden: Path, table: Metadata, dropped: frozenset[str]) -> Metadata:
    """Copy every entry that is not dropped into files of the same names; return their table of contents."""
    by_file: dict[str, list[Any]] = defaultdict(list)
    for index, info in table.storage_data.items():
        if index.fqn not in dropped:
            by_file[info.relative_path].append((info.offset, index, info))
    moved = {}
    for name, entries in by_file.items():
        with (path / name).open("rb") as source, (hidden / name).open("wb") as target:
            for offset, index, info in sorted(entries, key=lambda entry: entry[0]):
                moved[index] = dataclasses.replace(info, offset=target.tell())
                source.seek(offset)
                for start in range(0, info.length, _BLOCK):
                    target.write(source.read(min(_BLOCK, info.length - start)))
            _sync(target)
    return dataclasses.replace(
        table,
        storage_data=moved,
        state_dict_metadata={key: each for key, each in table.state_dict_metadata.items() if key not in dropped},
        planner_data={key: each for key, each in table.planner_data.items() if key not in dropped},
    )


def _write_table(path: Path, table: Metadata) -> None:
    with path.open("wb") as file:
        pickle.dump(table, file)
        _sync(file)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
