"""Where weights lie: from what a user writes (hub ids, folders, files, runs) to files on this machine.

Must not live here: reading tensors and what their names mean (weights_tensors.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json
from cascade_train.redaction import LONGEST_NAME, shortened

SINGLE_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
NETWORK_PARTS = ("prior", "decoder")
"""Folders of pipelines and exports that hold a denoising network: Stage C's and Stage B's."""

STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Stems of weight files in folders of diffusers and transformers."""

PACKAGED = {"package:tiny": Path(__file__).parents[1] / "tiny_weights"}
"""Weights that ship with the package: a folder with one folder for each part, fp16."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<inside>[\w./-]+))?")
_ENDINGS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bf16.safetensors",
    ".safetensors.index.bf16.json",
    ".bin",
    ".bin.index.json",
)
_PREFERRED = tuple(stem + ending for ending in _ENDINGS for stem in STEMS)


def find_weight_files(source: str, *, key: str = "model.weights", part: str | None = "network") -> list[Path]:
    """Return the files that hold the weights named by `source`, downloading from the hub if needed.

    Args:
        source: a single file; a folder of diffusers or transformers (one file or shards with an index); a pipeline's
            folder; a run of ours (its `export/`); a hub id, `owner/name[:subfolder]` or `owner/name:file`; or one of
            `PACKAGED`, or a folder in it.
        key: the config key that named the source, for messages.
        part: the folder of a pipeline or an export that is meant; "network" = whichever of `NETWORK_PARTS` is there,
            the first on the hub; None = the source itself.

    Raises:
        ConfigError: nothing there, no weights in it, or a hub id that cannot be had.
    """
    path = local_path(source)
    if path.is_file():
        return _one_file(path, key)
    if part == "network":
        part = next((name for name in NETWORK_PARTS if _holds(path, name)), NETWORK_PARTS[0])
    if path.is_dir():
        return _folder_files(path if part is None else find_part(path, part, key), key)
    return _hub_files(source, key, part)


def is_packaged(source: str) -> bool:
    """Return whether a source names what ships with the package, or a folder in it: `package:tiny/decoder`."""
    return source.partition("/")[0] in PACKAGED


def local_path(source: str) -> Path:
    """Return where a source lies on this machine if it does, which nothing checks."""
    name, _, inside = source.partition("/")
    return PACKAGED[name] / inside if name in PACKAGED else Path(source).expanduser()


def is_hub_id(source: str) -> bool:
    """Return whether a source that is no path could be a hub id, `owner/name[:subfolder]`."""
    return _HUB_ID.fullmatch(source) is not None


def _holds(folder: Path, part: str) -> bool:
    return (folder / "export" / part).is_dir() or (folder / part).is_dir()


def find_part(folder: Path, part: str, key: str) -> Path:
    """Return the folder of `part` ("prior", "lora") inside a run, an export or a pipeline; else `folder` itself."""
    for candidate in (folder / "export" / part, folder / part):
        if candidate.is_dir():
            return find_part(candidate, part, key)
    if (folder / "manifest.json").is_file():
        run, step = folder.parent.parent, folder.name.removeprefix("step_")
        raise ConfigError(
            f"{key}={folder}: is a checkpoint for resuming, in shards of its own form; name its run {run} instead, "
            f"whose export/{part} is read, or export it: cascade-train export from={run} step={step} out=…"
        )
    if (folder / "export").is_dir() or (folder / "metrics.jsonl").is_file() or (folder / "lora").is_dir():
        raise ConfigError(f"{key}={folder}: this run has left no export/{part}{_left_instead(folder, part)}")
    return folder


def _left_instead(folder: Path, part: str) -> str:
    export = folder if (folder / "lora").is_dir() else folder / "export"
    left = sorted(child.name for child in export.iterdir() if child.is_dir()) if export.is_dir() else []
    if not left:
        return f"; let it finish, or export its newest checkpoint: cascade-train export from={folder}"
    is_adapter = part in NETWORK_PARTS and "lora" in left
    adapter = "; an adapter is no whole network, give the weights that it was trained on" if is_adapter else ""
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
    try:
        content = read_json(index.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{key}={index}: is no index that can be read ({error}); copy it again") from error
    tensors = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(name, str) for name in tensors.values()):
        raise ConfigError(
            f"{key}={index}: has no weight_map of tensors to the files that hold them; copy or download it again, or "
            "name one file of weights"
        )
    names = sorted(set(tensors.values()))
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name or not name.endswith(SINGLE_FILE_SUFFIXES):
            raise ConfigError(
                f"{key}={index}: names {shortened(name, LONGEST_NAME)!r}, which is no file of weights beside it; an "
                "index may name nothing else"
            )
    return names


def _hub_files(source: str, key: str, part: str | None) -> list[Path]:
    match = _HUB_ID.fullmatch(source)
    if match is None or (match["inside"] is None and source.endswith(SINGLE_FILE_SUFFIXES)):
        raise ConfigError(
            f"{key}={source}: no such file or folder; give a path that exists, a hub id such as owner/name:subfolder, "
            f"or {' or '.join(PACKAGED)}"
        )
    inside = match["inside"] or part or ""
    if inside.endswith(SINGLE_FILE_SUFFIXES):
        return [_download(match["repo"], inside, source, key)]
    path = _first_in_hub_folder(match["repo"], inside, source, key)
    if path.suffix != ".json":
        return [path]
    return [_download(match["repo"], f"{inside}/{name}".lstrip("/"), source, key) for name in shard_names(path, key)]


def _first_in_hub_folder(repo: str, folder: str, source: str, key: str) -> Path:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    offline: Exception | None = None
    for name in _PREFERRED:
        try:
            return _fetch(repo, f"{folder}/{name}".lstrip("/"), cached_only=offline is not None)
        except LocalEntryNotFoundError as error:
            offline = error
        except EntryNotFoundError:
            continue
        except Exception as error:
            raise _unavailable(source, key, error) from error
    if offline is not None:
        raise _unavailable(source, key, offline) from offline
    raise ConfigError(f"{key}={source}: {repo} holds no weights in {folder!r}; name the subfolder after a colon")


def _download(repo: str, name: str, source: str, key: str) -> Path:
    try:
        return _fetch(repo, name, cached_only=False)
    except Exception as error:
        raise _unavailable(source, key, error) from error


def _fetch(repo: str, name: str, *, cached_only: bool) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, name, local_files_only=cached_only))


def _unavailable(source: str, key: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key}={source}: neither a path that exists here nor a hub id that could be had "
        f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name, download it where there is a "
        "network, or give a local folder or file"
    )
