"""Paths of weights on this machine, of the hub ids, folders, files and runs that users name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError

from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, parse_source, unavailable
from cascade_train.files.run_folder import is_run, no_checkpoint_yet
from cascade_train.files.untrusted import stored_mapping
from cascade_train.redaction import LONGEST_NAME, shortened

SINGLE_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
PIPELINE = "pipeline"
"""Folder of an export that holds a whole model of another family than the cascade, with a folder for each part."""

STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Stems of weight files in folders of diffusers and transformers."""

PACKAGED = {"package:tiny": Path(__file__).parents[1] / "tiny_weights"}
"""Weights that ship with the package: a folder with one folder for each part, fp16."""

SINGLE_FILE = "single_file"
"""Format of a whole pipeline in one file."""

NETWORK_FILES = {
    "diffusers": "{part}", "original": "{part}.original.safetensors", SINGLE_FILE: "pipeline.safetensors"
}  # fmt: skip
LORA_FILES = {"peft": "lora"} | {name: f"lora.{name}.safetensors" for name in ("comfyui", "kohya", "original")}
"""Format -> its name in an export; a network's part is prior (Stage C) or decoder (Stage B)."""

CONFIG_FILES = ("config.json",)
"""Read by transformers beside a tower's weights."""

TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Read by transformers of a tokenizer, where they exist."""

_ENDINGS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bf16.safetensors",
    ".safetensors.index.bf16.json",
    ".bin",
    ".bin.index.json",
)
_PREFERRED = tuple(stem + ending for ending in _ENDINGS for stem in STEMS)


@dataclass(frozen=True, kw_only=True)
class WeightsSpec:
    """The files that a part of a model loads; `key`, `source` and `part` as of `find_weight_files`.

    Attributes:
        beside: files that are loaded too, where they exist.
        weights: whether weights are among them; a tokenizer has none.
    """

    key: str
    source: str
    part: str | None = None
    beside: tuple[str, ...] = ()
    weights: bool = True


_found: dict[Any, list[Path]] | None = None  # within `weights_found_once`


@contextmanager
def weights_found_once() -> Iterator[None]:
    """Look for each source once within the block, here or on the hub, so that the recorded files are those loaded."""
    global _found
    _found = {}
    try:
        yield
    finally:
        _found = None


def _once(find: Callable[..., list[Path]]) -> Callable[..., list[Path]]:
    @functools.wraps(find)
    def found(*args: Any, **options: Any) -> list[Path]:
        if _found is None:
            return find(*args, **options)
        key = (find, args, *sorted(options.items()))
        if key not in _found:
            _found[key] = find(*args, **options)
        return _found[key]

    return found


@_once
def find_weight_files(
    source: str, *, key: str = "model.weights", part: str | tuple[str, ...] | None = None
) -> list[Path]:
    """Return the files that hold the weights named by `source`, downloading from the hub if needed.

    `source`: a single file; a folder of diffusers or transformers (one file or shards with an index); a pipeline's
    folder; a run (its `export/`); a hub id, `owner/name[@revision][:subfolder]` or `…:file`; or one of `PACKAGED`, or a
    folder in it. `part`: the folder of a pipeline or an export; of several, whichever exists, the first on the hub;
    None = the source itself. A ConfigError, which names `key`, where there are no weights.
    """
    path = local_path(source)
    if path.is_file():
        return _one_file(path, key)
    if isinstance(part, tuple):
        part = next((name for name in part if _holds(path, name)), part[0])
    if path.is_dir():
        return _folder_files(path if part is None else find_part(path, part, key), key)
    files = hub_files(WeightsSpec(key=key, source=source, part=part))
    return [file for file in files if file.suffix != ".json"]


def find_files(spec: WeightsSpec) -> list[Path]:
    """Return every file that a part loads, downloaded if needed; errors as of `find_weight_files`."""
    path = local_path(spec.source)
    if not path.exists():
        return hub_files(spec)
    folder = find_part(path, spec.part, spec.key) if path.is_dir() and spec.part is not None else path
    beside = [folder / name for name in spec.beside if (folder / name).is_file()]
    return [*beside, *(find_weight_files(spec.source, key=spec.key, part=spec.part) if spec.weights else [])]


def find_pipeline(source: str) -> tuple[Path, str] | None:
    """Return the folder of a pipeline of diffusers that a source is or holds, and its class; None = there is none."""
    root = local_path(source)
    for folder in (root, root / PIPELINE, root / "export" / PIPELINE):
        index = folder / "model_index.json"
        if index.is_file():
            return folder, str(stored_mapping(index).get("_class_name"))
    return None


def is_packaged(source: str) -> bool:
    """Return whether a source is one of `PACKAGED`, or a folder in it: `package:tiny/decoder`."""
    return source.partition("/")[0] in PACKAGED


def local_path(source: str) -> Path:
    """Return the path of a source on this machine, which may not exist."""
    name, _, inside = source.partition("/")
    return PACKAGED[name] / inside if name in PACKAGED else Path(source).expanduser()


def _holds(folder: Path, part: str) -> bool:
    return any((folder / inside / part).is_dir() for inside in ("", "export", PIPELINE, f"export/{PIPELINE}"))


def find_part(folder: Path, part: str, key: str) -> Path:
    """Return the folder of `part` ("prior", "lora") inside a run, an export or a pipeline; else `folder` itself."""
    for candidate in (folder / "export" / part, folder / part, folder / "export" / PIPELINE, folder / PIPELINE):
        if candidate.is_dir():
            return find_part(candidate, part, key)
    if (folder / "manifest.json").is_file():
        run, step = folder.parent.parent, folder.name.removeprefix("step_")
        raise ConfigError(
            f"{key}={folder}: is a checkpoint for resuming, in shards of its own form; name its run {run} instead, "
            f"whose export/{part} is read, or export it: cascade-train export from={run} step={step} out=…"
        )
    is_bare = folder.is_dir() and [each.name for each in folder.iterdir()] == ["config.yaml"]
    if (folder / "export").is_dir() or is_run(folder) or (folder / "lora").is_dir() or is_bare:
        network = f"; a network is set by model.weights={folder}" if key == "task.weights" and part == "lora" else ""
        left = _describe_exports(folder, part)
        raise ConfigError(
            f"{key}={folder}: this run has left no export/{part}{left}{network if 'only' in left else ''}"
        )
    return folder


def _describe_exports(folder: Path, part: str) -> str:
    export = folder if (folder / "lora").is_dir() else folder / "export"
    left = sorted(child.name for child in export.iterdir() if child.is_dir()) if export.is_dir() else []
    if not left:
        if reason := no_checkpoint_yet(folder):
            return f": {reason}"
        return f"; let it finish, or export its newest checkpoint: cascade-train export from={folder}"
    adapter = "; an adapter is no whole network, give the weights that it was trained on" if "lora" in left else ""
    return f", only {', '.join(left)}{adapter}"


def _one_file(path: Path, key: str) -> list[Path]:
    if path.suffix == ".json":
        names = shard_names(path, key)
        missing = [name for name in names if not (path.parent / name).is_file()]
        if missing:
            raise ConfigError(f"{key}={path.parent}: {path.name} names {missing[0]}, which is not there; copy it again")
        return [path.parent / name for name in names]
    if path.suffix not in SINGLE_FILE_SUFFIXES:
        raise ConfigError(f"{key}={path}: must end in one of {', '.join(SINGLE_FILE_SUFFIXES)}")
    return [path]


def _folder_files(folder: Path, key: str) -> list[Path]:
    for name in _PREFERRED:
        if (folder / name).is_file():
            return _one_file(folder / name, key)
    inside = ", ".join(sorted(child.name for child in folder.iterdir())[:6]) or "nothing"
    raise ConfigError(
        f"{key}={folder}: no weights in this folder, looked for {_PREFERRED[0]} and the like, found {inside}"
    )


def shard_names(index: Path, key: str) -> list[str]:
    """Return the files beside an index that hold a model's tensors, sorted; a ConfigError if it names others."""
    tensors = stored_mapping(index, key=key).get("weight_map")
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(name, str) for name in tensors.values()):
        raise ConfigError(
            f"{key}={index}: has no weight_map of tensors to the files that hold them; copy or download it again, or "
            "name one file of weights"
        )
    names = sorted(set(tensors.values()))
    for name in names:
        is_name = name.endswith(SINGLE_FILE_SUFFIXES) and len(name.encode(errors="replace")) <= 255  # bytes
        if not is_name or "/" in name or "\\" in name:
            raise ConfigError(
                f"{key}={index}: names {shortened(name, LONGEST_NAME)!r}, which is no file of weights beside it; an "
                "index may name nothing else"
            )
    return names


@_once
def hub_files(spec: WeightsSpec) -> list[Path]:
    """Return the files of a spec on the hub, downloaded if needed; a ConfigError if they cannot be reached."""
    source, names = hub_names(spec)
    return [_fetch(source, name, spec) for name in names]


def hub_source(spec: WeightsSpec) -> HubSource:
    """Return the place on the hub that a spec names; a ConfigError where it names none."""
    source = parse_source(spec.source)
    if source is None or (not source.inside and spec.source.endswith(SINGLE_FILE_SUFFIXES)):
        raise ConfigError(
            f"{spec.key}={spec.source}: no such file or folder; give a path that exists, a hub id such as "
            f"owner/name:subfolder, or {' or '.join(PACKAGED)}"
        )
    return source


def refuse_missing(specs: Iterable[WeightsSpec]) -> None:
    """Raise a ConfigError where a source is neither on this machine nor a name of the hub."""
    for spec in specs:
        if not local_path(spec.source).exists():
            hub_source(spec)


def hub_names(spec: WeightsSpec) -> tuple[HubSource, list[str]]:
    """Return the repository of a spec and the names of its files there, without downloading weights."""
    source = hub_source(spec)
    folder = source.inside or spec.part or ""
    if folder.endswith(SINGLE_FILE_SUFFIXES):
        return source, [folder]
    prefix = f"{folder}/" if folder else ""
    wanted: list[tuple[str, ...]] = [(prefix + name,) for name in spec.beside]
    if spec.weights:
        wanted.append(tuple(prefix + name for name in _PREFERRED))
    found = _find_on_hub(source, wanted, spec)
    if not found or (spec.weights and not found[-1].endswith(_ENDINGS)):
        raise ConfigError(
            f"{spec.key}={spec.source}: {source.repo} holds no weights in {folder!r}; name the subfolder after a colon"
        )
    if found[-1].endswith(".json") and spec.weights:
        found += [prefix + name for name in shard_names(_fetch(source, found[-1], spec), spec.key)]
    return source, found


def _find_on_hub(source: HubSource, wanted: list[tuple[str, ...]], spec: WeightsSpec) -> list[str]:
    """Return the first that the repository has of each list of names; a ConfigError if the hub cannot be reached."""
    found: list[str] = []
    offline: Exception | None = None
    for names in wanted:
        for name in names:
            try:
                if source.look(name, cached_only=offline is not None) is not None:
                    found.append(name)
                    break
            except LocalEntryNotFoundError as error:
                offline = offline or error
            except Exception as error:
                raise unavailable(f"{spec.key}={spec.source}", error) from error
    if offline is not None and (not found or (spec.weights and not found[-1].endswith(_ENDINGS))):
        raise unavailable(f"{spec.key}={spec.source}", offline) from offline
    return found


def _fetch(source: HubSource, name: str, spec: WeightsSpec) -> Path:
    try:
        return source.fetch(name)
    except Exception as error:
        raise unavailable(f"{spec.key}={spec.source}", error) from error
