"""The settings that a cache depends on, and its use by a run in place of encoders."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cascade_train.config.arguments import component_options, declared_roles
from cascade_train.data.cached import Cached
from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.formats.weights_source import local_path
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Task


def encoder_identity(cfg: Mapping[str, Any], stage: Stage, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of a plain configuration that change these products, by key."""
    makers = {**stage.image_products, **stage.caption_products}
    seeded = bool(cfg["model"].get("random_encoders"))
    found: dict[str, Any] = {"train.precision": cfg["train"]["precision"], "model.random_encoders": seeded}
    for part in sorted({makers[name] for name in names}):
        node = by_content(cfg["model"][part], seeded=seeded)
        found |= {f"model.{part}.{key}": value for key, value in sorted(node.items())}
    return found


def data_identity(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the data, joined sources included, that change a sample, by key."""
    held = [option for option in component_options(cfg["data"], "data.") if not option.roles & {"Free", "Order"}]
    return {key: content(value, None) if "File" in roles else value for key, value, roles in held}


def task_identity(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes the tensors that a task makes of pictures, by key."""
    node = by_content({key: cfg["task"][key] for key in ("_target_", "filter") if key in cfg["task"]})
    return {f"task.{key}": value for key, value in node.items()}


def by_content(node: Mapping[str, Any], *, seeded: bool = False) -> dict[str, Any]:
    """Return a component's options, at any depth files by content, null where values are seeded."""
    found: dict[str, Any] = {
        key: by_content(value, seeded=seeded) if isinstance(value, Mapping) else value for key, value in node.items()
    }
    for key in [name for name, roles in declared_roles(node).items() if "File" in roles and name in node]:
        inside = "subfolder" if key == "weights" else f"{key}_subfolder"
        found[key] = None if seeded else content(found[key], found.pop(inside, None))
    return found


def content(source: str | None, subfolder: str | None) -> dict[str, str | None] | None:
    """Return name and SHA-256 of a source of weights, None where its files are not on this machine."""
    if source is None:
        return None
    files = local_files(source, subfolder)
    state = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return {"source": "/".join(filter(None, (source, subfolder))), "sha256": state.hexdigest() if files else None}


def local_files(source: str, subfolder: str | None) -> list[Path]:
    """Return the files of a path, or those of a hub id that were downloaded before."""
    path, on_hub = local_path(source), parse_source(source)
    if not path.exists() and on_hub is not None and (folder := on_hub.folder()):
        path = folder / on_hub.inside
    path = path / (subfolder or "")
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


def first_difference(own: Mapping[str, Any], held: Mapping[str, Any]) -> str | None:
    """Return the first key, with both values, in which a run differs from what a cache was made with."""
    for key, value in own.items():
        other = held.get(key)
        if not _same(value, other):
            return f"{key}={_shown(value)}, where the cache has {_shown(other)}"
    return None


def _same(own: Any, held: Any) -> bool:
    """Compare values; files by their content, or by name where one is not on this machine."""
    if not (_is_content(own) and _is_content(held)):
        if isinstance(own, Mapping) and isinstance(held, Mapping):
            return own.keys() == held.keys() and all(_same(value, held[key]) for key, value in own.items())
        return bool(own == held)
    if None in (own["sha256"], held["sha256"]):
        return bool(own["source"] == held["source"])
    return bool(own["sha256"] == held["sha256"])


def _is_content(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"source", "sha256"}


def _shown(value: Any) -> str:
    return f"{value['source']} (SHA-256 {(value['sha256'] or 'unknown')[:12]})" if _is_content(value) else str(value)


def take_cache(cfg: Mapping[str, Any], stage: Stage, task: Task, source: Cached) -> None:
    """Let an unbuilt stage read from an opened cache, and leave out the encoders whose outputs it holds.

    A ConfigError where it lacks what stage or task need, was made by other encoders, or holds what the task trains.
    """
    manifest, where = source.manifest, f"data.path={source.path}"
    refuse_reconstruction(stage, task, f"and {where} is a cache, which has none: use the data that it was made of")
    if not stage.image_products:
        raise ConfigError(f"{where}: nothing of {stage.name} can be read from a cache: {stage.why_not_cached}")
    needed = {name: f"which model.{part} makes of pictures" for name, part in stage.image_products.items()}
    needed |= stage.needed_facts
    if lacking := sorted(needed.keys() - manifest.tensors.keys()):
        raise ConfigError(f"{where} lacks {', '.join(lacking)}, {needed[lacking[0]]}: make a cache with this model")
    own = encoder_identity(cfg, stage, [*stage.image_products, *manifest.captions])
    if task.sample_transform() is not None:
        if not task_identity(cfg).keys() & manifest.identity.keys():
            raise ConfigError(f"{where} lacks what the task makes of pictures: make a cache with this task and filter")
        own |= task_identity(cfg)
    difference = first_difference(own, manifest.identity)
    if difference is not None:
        raise ConfigError(f"{where} was made by another model: {difference}. Set it back, or make another cache.")
    check_data(cfg, source)
    if cfg["sample"]["every_steps"] is not None and (stage.needs_image or task.needs_image):
        raise ConfigError(f"sample.every_steps: grids need pictures here, and {where} has none: set it to null")
    if stage.needs_image and cfg["validate"]["reconstructions"]:
        raise ConfigError(f"validate.reconstructions: are of pictures, and {where} has none: set it to 0")
    makers = {**stage.image_products, **stage.caption_products}
    left_out = frozenset(makers[name] for name in [*stage.image_products, *manifest.captions])
    refuse_trained(left_out & task.trained_parts(), "the cache holds what it makes")
    samples = cfg["sample"]["every_steps"] is not None
    stage.left_out |= left_out - ({stage.decoded_by} if samples else set())
    stage.reads_cache = True
    if manifest.captions:
        stage.caption_lookup = source.find_captions
        source.find_captions(["", cfg["sample"]["negative_prompt"], *(cfg["sample"]["prompts"] or [])])


def check_data(cfg: Mapping[str, Any], source: Cached) -> None:
    """Refuse options that differ from those of the cache, except defaults, which follow it."""
    defaults = component_defaults(source)
    held = {**defaults, **source.manifest.identity}
    for key, own in data_identity(cfg).items():
        is_held = not key.endswith("_target_") and (source.manifest.captions or not key.startswith("data.captions"))
        if is_held and own != held.get(key) and not (key in defaults and own == defaults[key]):
            follows = key == "data.image_size" and own == cfg.get("model", {}).get("image_size")
            typed = "model.image_size" if follows else key
            remedy = f"Set {typed}={held.get(key)}" if follows else f"Leave {key} out"
            raise ConfigError(
                f"{typed}={own} differs from the cache at data.path={source.path}, which was made with"
                f" {typed}={held.get(key)}. {remedy}, or make another cache."
            )


def component_defaults(source: Cached) -> dict[str, Any]:
    """Return the defaults of a source's options, nested ones included, by key."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not dataclasses.MISSING:
            found[field.name] = dataclasses.asdict(value) if hasattr(value, "__dataclass_fields__") else value
    return {option.key: option.value for option in component_options(found, "data.")}


def refuse_reconstruction(stage: Stage, task: Task, why: str) -> None:
    """Refuse a task that is scored by pictures themselves."""
    if not task.denoises:
        raise ConfigError(f"task: what makes pictures of {stage.name}'s latents trains on pictures, {why}")


def refuse_trained(parts: Iterable[str], why: str) -> None:
    """Refuse parts whose outputs are cached and that train, so that their outputs would change."""
    for part in parts:
        raise ConfigError(
            f"task: something in model.{part} trains, but {why}: make the cache with captions=false, which leaves"
            " captions to the text encoder"
        )
