"""The settings that a cache depends on, and its use by a run in place of encoders."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cascade_train.config.arguments import component_options
from cascade_train.data.cached import CONTENT, Cached, same_option
from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.formats.weights_source import local_path
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Task


def encoder_identity(cfg: Mapping[str, Any], stage: Stage, names: Iterable[str]) -> dict[str, Any]:
    """Options of a plain configuration that change these products, by key."""
    makers = {**stage.image_products, **stage.caption_products}
    seeded = bool(cfg["model"].get("random_encoders"))
    identity: dict[str, Any] = {"train.precision": cfg["train"]["precision"], "model.random_encoders": seeded}
    for part in sorted({makers[name] for name in names}):
        identity |= options_by_content(cfg["model"][part], f"model.{part}.", seeded=seeded)
    return identity


def data_identity(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the data, joined sources included, that change a sample, by key."""
    return options_by_content(cfg["data"], "data.", without={"Free", "Order"})


def task_identity(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What changes the tensors that a task makes of pictures, by key."""
    node = {key: cfg["task"][key] for key in ("_target_", "filter") if key in cfg["task"]}
    return options_by_content(node, "task.")


def options_by_content(
    node: Mapping[str, Any], prefix: str, *, seeded: bool = False, without: Collection[str] = ()
) -> dict[str, Any]:
    """A component's options by key, without those of some roles; files by content, None where values are seeded."""
    options = [option for option in component_options(node, prefix) if not option.roles.intersection(without)]
    identity = {key: value for key, value, _ in options}
    for key in [key for key, _, roles in options if "File" in roles]:
        inside = identity.pop(
            f"{key.removesuffix('weights')}subfolder" if key.endswith(".weights") else f"{key}_subfolder", None
        )
        identity[key] = None if seeded else content(identity[key], inside)
    return identity


def content(source: str | None, subfolder: str | None) -> str | None:
    """Name and digest of a source of weights, see `same_option`; without the digest of files that are elsewhere."""
    if source is None:
        return None
    files = local_files(source, subfolder)
    state = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return f"{'/'.join(filter(None, (source, subfolder)))}{CONTENT}{state.hexdigest()[:32] if files else 'unknown'}"


def local_files(source: str, subfolder: str | None) -> list[Path]:
    """The files of a path, or those of a hub id that were downloaded before."""
    path, on_hub = local_path(source), parse_source(source)
    if not path.exists() and on_hub is not None and (folder := on_hub.folder()):
        path = folder / on_hub.inside
    path = path / (subfolder or "")
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def take_cache(cfg: Mapping[str, Any], stage: Stage, task: Task, source: Cached) -> None:
    """Read from an opened cache in place of encoders; a ConfigError where it does not fit stage or task."""
    manifest, where = source.manifest, f"data.path={source.path}"
    refuse_reconstruction(stage, task, f"and {where} is a cache, which has none: use the data that it was made of")
    if not stage.image_products:
        raise ConfigError(f"{where}: nothing of {stage.name} can be read from a cache: {stage.why_not_cached}")
    needed = {name: f"which model.{part} makes of pictures" for name, part in stage.image_products.items()}
    needed |= stage.needed_facts
    if lacking := sorted(needed.keys() - manifest.tensors.keys()):
        raise ConfigError(f"{where} lacks {', '.join(lacking)}, {needed[lacking[0]]}: make a cache with this model")
    identity = encoder_identity(cfg, stage, [*stage.image_products, *manifest.captions])
    if task.sample_transform() is not None:
        if not task_identity(cfg).keys() & manifest.identity.keys():
            raise ConfigError(f"{where} lacks what the task makes of pictures: make a cache with this task and filter")
        identity |= task_identity(cfg)
    for key, value in identity.items():
        if not same_option(value, cached := manifest.identity.get(key)):
            difference = f"{key}={value}, where the cache has {cached}"
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
    cached = {**defaults, **source.manifest.identity}
    for key, option in data_identity(cfg).items():
        is_held = not key.endswith("_target_") and (source.manifest.captions or not key.startswith("data.captions"))
        if is_held and not same_option(option, cached.get(key)) and not (key in defaults and option == defaults[key]):
            follows = key == "data.image_size" and option == cfg.get("model", {}).get("image_size")
            typed = "model.image_size" if follows else key
            remedy = f"Set {typed}={cached.get(key)}" if follows else f"Leave {key} out"
            text = f"{typed}={option} differs from the cache at data.path={source.path}, which was made with"
            raise ConfigError(f"{text} {typed}={cached.get(key)}. {remedy}, or make another cache.")


def component_defaults(source: Cached) -> dict[str, Any]:
    """The defaults of a source's options, nested ones included, by key."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not dataclasses.MISSING:
            defaults[field.name] = dataclasses.asdict(value) if hasattr(value, "__dataclass_fields__") else value
    return {option.key: option.value for option in component_options(defaults, "data.")}


def refuse_reconstruction(stage: Stage, task: Task, why: str) -> None:
    """Refuse a task that is scored by pictures themselves."""
    if not task.denoises:
        raise ConfigError(f"task: what makes pictures of {stage.name}'s latents trains on pictures, {why}")


def refuse_trained(parts: Iterable[str], why: str) -> None:
    """Refuse parts whose outputs are cached and that train, so that their outputs would change."""
    for part in parts:
        raise ConfigError(f"task: something in model.{part} trains, but {why}: make the cache with captions=false")
