"""Where a trained stage lies and what it was trained as, from what a user names: a run, its export, or weights.

Used by the verbs that look at results. Must not live here: building it (trained.py), and painting (cascade.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.config.published import published_config
from cascade_train.config.saved import export_folder, load_saved_config
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import stored_size
from cascade_train.models.formats.weights_source import is_hub_id, is_packaged
from cascade_train.results.architecture import run_of


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained stage that is not built yet.

    Attributes:
        origin: the argument and the source, as people gave them: `decoder=runs/b`.
        cfg: the checked configuration.
        export: what a run left; None = the weights that the configuration names.
    """

    origin: str
    cfg: DictConfig
    export: Path | None


def find_model(source: str, *, key: str, part: str, allow_any_target: bool = False) -> TrainedModel:
    """Find a run, its export, something in that, the packaged weights, or others of a published size.

    Args:
        source: what the user named; weights of a published size may be a folder, a file, or a hub id.
        key: the argument that named it.
        part: the folder of a pipeline that is meant: "prior", "decoder", or "network" for whichever is there.
        allow_any_target: build classes of any package that a run's configuration names.

    Raises:
        ConfigError: nothing there, a run without export, or weights of no published size.
    """
    origin, path = f"{key}={source}", Path(source)
    run = run_of(path)
    on_hub = is_hub_id(source) and not Path(path.parts[0]).is_dir()  # runs/typo is no repository of an owner "runs"
    if run is None and (path.exists() or on_hub or is_packaged(source)) and not (path / "checkpoints").is_dir():
        return TrainedModel(origin=origin, cfg=_published(source, key, part), export=None)
    run = path if run is None else run
    cfg = load_saved_config(run, allow_any_target=allow_any_target, key=key)
    return TrainedModel(origin=origin, cfg=cfg, export=export_folder(run, key=key))


def _published(source: str, key: str, part: str) -> DictConfig:
    """Return the configuration of weights of a published size, with the frozen parts that lie beside them."""
    packaged = "b_tiny" if "decoder" in (part, Path(source).name) else "c_tiny"
    model = packaged if is_packaged(source) else stored_size(source, key=key, part=part)
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


def use_codec(model: TrainedModel, codec: str) -> None:
    """Let Stage A's trained weights take the place of those that a Stage B was trained with.

    Raises:
        ConfigError: no Stage B, or one whose Stage A has no weights.
    """
    stage_a = model.cfg.model.get("stage_a")
    if stage_a is None or "weights" not in stage_a:
        reason = "is no Stage B" if stage_a is None else f"decodes by {stage_a._target_}, which takes no weights"
        raise ConfigError(
            f"codec={codec}: Stage A under a Stage B, and {model.origin} {reason}. Leave codec=null, or give a Stage B "
            "on a VQGAN, such as one of model=b_3b or b_tiny."
        )
    stage_a.weights = codec
