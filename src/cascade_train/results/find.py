"""Find trained models, their configurations and networks. Nothing is loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cascade_train.assembly.build import build_node
from cascade_train.assembly.components import build_component, families
from cascade_train.config.groups import did_you_mean, option_files, option_targets
from cascade_train.config.saved import CONFIG_NAME, composed, export_folder, load_saved_config, published_config
from cascade_train.config.targets import import_target
from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.family import Family
from cascade_train.models.formats.lora_files import adapter_size, holds_lora
from cascade_train.models.formats.weights import stored_size
from cascade_train.models.formats.weights_source import PIPELINE, find_pipeline, is_packaged


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained stage that is not built yet: the argument that named it, `decoder=runs/b`, and its configuration.

    `export` is what a run left; None = the weights that the configuration names.
    """

    origin: str
    cfg: DictConfig
    export: Path | None


def find_model(source: str, *, key: str, part: str | None, allow_any_target: bool = False) -> TrainedModel:
    """Find a run, its export, something in that, the packaged weights, or others of a published size.

    These may be a folder, a file, or a hub id. `key` is the argument that named them, `part` the folder of a pipeline:
    "prior", "decoder", or None for whichever is there.

    Raises:
        ConfigError: nothing there, a run without export, or weights of no published size.
    """
    origin, path = f"{key}={source}", Path(source)
    run = run_of(path)
    # runs/typo is no repository of an owner "runs"
    on_hub = parse_source(source) is not None and not Path(path.parts[0]).is_dir()
    if run is None and (path.exists() or on_hub or is_packaged(source)) and not (path / "checkpoints").is_dir():
        return TrainedModel(origin=origin, cfg=_published(source, key, part), export=None)
    run = path if run is None else run
    cfg = load_saved_config(run, allow_any_target=allow_any_target, key=key)
    return TrainedModel(origin=origin, cfg=cfg, export=export_folder(run, key=key))


def _published(source: str, key: str, part: str | None) -> DictConfig:
    """Configuration of published weights and the frozen parts beside them."""
    if (cfg := pipeline_config(source)) is not None:
        return cfg
    model = _packaged_model(source, part) if is_packaged(source) else _size_of(source, key, part)
    if model is None:
        raise ConfigError(
            f"{key}={source}: its tensors are of no published size, so that nothing says what belongs to them. Name "
            "the run that left them, or its export/ with config.yaml in it."
        )
    cfg = published_config(model, source)
    if (Path(source) / "text_encoder").is_dir() and (Path(source) / "tokenizer").is_dir():
        cfg.model.text_encoder.update({"weights": source, "subfolder": "text_encoder"})
        cfg.model.text_encoder.update({"tokenizer": source, "tokenizer_subfolder": "tokenizer"})
    if "stage_a" in cfg.model and (Path(source) / "vqgan").is_dir():
        cfg.model.stage_a.weights = source
    return cfg


def _packaged_model(source: str, part: str | None) -> str:
    """Model that a folder of the packaged weights belongs to."""
    folder = source.partition("/")[2].partition("/")[0]
    if f"{folder}_tiny" in option_files("model"):
        return f"{folder}_tiny"
    return "b_tiny" if "decoder" in (part, folder) else "c_tiny"


def whole_pipeline(source: str) -> tuple[Family, Path, str] | None:
    """Family, folder and `model=` of the whole pipeline that a source is or holds."""
    folder, kind = find_pipeline(source) or (Path(), "")
    return next(((each, folder, each.pipelines[kind]) for each in families() if kind in each.pipelines), None)


def pipeline_config(source: str) -> DictConfig | None:
    """Checked configuration of a whole pipeline; None = it is none."""
    found = whole_pipeline(source)
    if found is None:
        return None
    _, folder, model = found
    stage = import_target(option_targets("model")[model])
    return composed(*stage.stored_pipeline(folder, model))


def use_codec(model: TrainedModel, codec: str) -> None:
    """Replace the Stage A that a Stage B was trained with."""
    stage_a = model.cfg.model.get("stage_a")
    if stage_a is None or "weights" not in stage_a:
        reason = "is no Stage B" if stage_a is None else f"decodes by {stage_a._target_}, which takes no weights"
        raise ConfigError(
            f"codec={codec}: Stage A under a Stage B, and {model.origin} {reason}. Leave codec=null, or give a Stage B "
            "on a VQGAN, such as one of model=b_3b or b_tiny."
        )
    stage_a.weights = codec


def stored_network(source: str, *, model: str | None, key: str, allow_any_target: bool) -> Any:
    """Network that `source` belongs to, on the meta device.

    `source` is a run, its export or a folder in it, another folder, a file, or a hub id. Without `model`, an option of
    that group, the network is the run's, else of the published size that the tensors have.
    """
    run = run_of(Path(source))
    cfg: DictConfig | None = None
    if model is None and run is not None:
        cfg = load_saved_config(run, allow_any_target=allow_any_target)
    elif model is None:
        cfg = pipeline_config(source)
    if cfg is not None:
        stage, task = build_component(cfg, "model"), build_component(cfg, "task")
        trained = None
        if not stage.denoises or not build_component(cfg, "objective").denoises:
            trained = f"what makes pictures of {stage.name}'s latents"
        elif not task.trains_network and not holds_lora(source):
            trained = f"what trains beside the network ({type(task).__name__})"
        if trained is not None:
            raise ConfigError(
                f"{key}={source}: a run of {trained}, whose export/ holds every format that there is of it."
            )
        return stage.network_config.build()
    if model is None:
        model = adapter_size(families(), source, key=key) if holds_lora(source) else _size_of(source, key, None)
    nodes = {name: file.get("network") for name, file in option_files("model").items()}
    networks = {name: node for name, node in nodes.items() if node is not None}
    if model is None:
        options = ", ".join(networks)
        raise ConfigError(f"{key}={source}: its tensors are of no published size; name it by model=, one of {options}.")
    if model not in networks:
        raise ConfigError(f"model={model}: no such option.{did_you_mean(model, networks)}")
    return build_node(networks[model]).build()


def _size_of(source: str, key: str, part: str | None) -> str | None:
    found = (stored_size(family, source, key=key, part=part) for family in families() if family.sizes)
    return next((size for size in found if size is not None), None)


def run_of(path: Path) -> Path | None:
    """Folder that holds the configuration of the run that left `path`; None = no run did."""
    folder = path.parent if path.is_file() else path
    inside = {"lora", PIPELINE, "export", *(part for family in families() for part in family.parts)}
    while not (folder / CONFIG_NAME).is_file():
        if folder.name not in inside:
            return None
        folder = folder.parent
    return folder
