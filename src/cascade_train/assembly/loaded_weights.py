"""Which files of weights a configuration loads, and the record of those that a run has loaded.

Where they lie and how they come here is not known here (models/formats/weights_source.py, files/hub.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cascade_train.assembly.components import Parts
from cascade_train.config.arguments import component_options
from cascade_train.config.saved import to_plain
from cascade_train.engine.checkpoint.folder import hash_file
from cascade_train.errors import ConfigError
from cascade_train.files.durable import write_durably
from cascade_train.files.hub import announced_hash, parse_source
from cascade_train.files.untrusted import load_mapping
from cascade_train.models.formats.weights_source import WeightsSpec, find_files, local_path

RECORD = "weights.json"
"""In a run: key -> source, commit on the hub, and size and SHA-256 of each file."""


def weight_specs(cfg: DictConfig, parts: Parts) -> list[WeightsSpec]:
    """Return the files that the stage loads, except of parts that are left out, and the task's files on the hub."""
    options = component_options(to_plain(cfg)["task"], "task.")
    files = [(option.key, option.value) for option in options if "File" in option.roles and _on_hub(option.value)]
    return [*parts.stage.weight_specs(), *(WeightsSpec(key=key, source=value) for key, value in files)]


def _on_hub(value: Any) -> bool:
    source = parse_source(value) if isinstance(value, str) and not local_path(value).exists() else None
    return source is not None and bool(source.inside)


def describe_weights(specs: list[WeightsSpec]) -> dict[str, Any]:
    """Return the files of specs as JSON values, by key: see `RECORD`."""
    with ThreadPoolExecutor() as pool:
        return {spec.key: found for spec, found in zip(specs, pool.map(_described, specs), strict=True)}


def _described(spec: WeightsSpec) -> dict[str, Any]:
    source = None if local_path(spec.source).exists() else parse_source(spec.source)
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in find_files(spec)}
    return {"source": spec.source, "commit": source and source.commit, "files": files}


def _sha256(path: Path) -> str:
    """Return a file's SHA-256; a large file of the hub was checked when it was downloaded, and is named by it."""
    announced = announced_hash(path)
    return announced if announced is not None and len(announced) == 64 else hash_file(path).sha256


def record_weights(run: Path, specs: list[WeightsSpec], *, initial: tuple[str, ...], resumed: bool) -> None:
    """Write the record of a run; where it is `resumed`, keep its own and compare: keys of `initial` values may differ.

    Raises:
        ConfigError: a frozen part has other files than at the start of the run.
    """
    path, found = run / RECORD, describe_weights(specs)
    held: Mapping[str, Any] = load_mapping(path) if resumed and path.is_file() else {}
    for key, own in found.items():
        before = held.get(key, own)
        if key not in initial and own["files"] != before["files"]:
            commit = before["commit"]
            pin = "" if commit is None else f": the commit {commit} behind an @ in the source names them for good"
            raise ConfigError(
                f"{key}={own['source']}: its files are others than this run began with ({path}); bring the old ones "
                f"back{pin}; or start a new run"
            )
    write_durably(path, json.dumps({**found, **held}, indent=2) + "\n")
