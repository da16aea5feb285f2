"""One folder for diffusers' combined pipeline, of trained stages; its content: models/formats/export_pipelines.py."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from cascade_train.assembly.components import build_component
from cascade_train.diffusion.target import EpsilonTarget
from cascade_train.distributed.process_group import process_group
from cascade_train.errors import ConfigError
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.formats.export import DTYPES, Exported, build_plain_network, network_config
from cascade_train.models.formats.export_pipelines import decoder_parts, prior_parts, save_combined
from cascade_train.models.formats.weights import load_state
from cascade_train.models.latent_codec import VQGAN
from cascade_train.models.stage_b import StageB
from cascade_train.models.stage_c import StageC
from cascade_train.results.find import TrainedModel
from cascade_train.results.load import load_parts
from cascade_train.results.paint import Fingerprint, check_same_latents, fit_sizes


def export_combined(model: TrainedModel, decoder: TrainedModel, *, dtype: str | None, out: Path) -> Exported:
    """Write Stage C and Stage B, with its Stage A, as one folder for diffusers' combined pipeline.

    Args:
        model: Stage C.
        decoder: Stage B.
        dtype: of the networks, a key of `DTYPES`; None = as they are stored.
        out: the folder.

    Raises:
        ConfigError: adapters, stages that were not made for each other, or a Stage A that no pipeline has.
        RunError: what was written reads back differently.
    """
    _check(model, decoder)
    with process_group() as world:
        first, second = (load_parts(each, world).stage for each in (model, decoder))
    if not isinstance(first, StageC) or not isinstance(second, StageB):
        raise AssertionError("stages in wrong places are refused before")
    check_same_latents(model, Fingerprint.of(first), decoder, Fingerprint.of(second))
    states = [_stored(each, stage, dtype) for each, stage in ((model, first), (decoder, second))]
    return save_combined(states[0], prior_parts(first), states[1], decoder_parts(second), out)


def _check(model: TrainedModel, decoder: TrainedModel) -> None:
    """Refuse, before anything is built, what no pipeline of diffusers has a place for."""
    fit_sizes(model, decoder, height=None, width=None, compression=None)  # stages in their places
    for each in (model, decoder):
        if not build_component(each.cfg, "task").trains_network:
            raise ConfigError(
                f"{each.origin}: a run of what is added to a network. Merge adapters into weights first, python -m "
                "cascade-train merge, and name those in the run's place."
            )
        target = build_component(each.cfg, "objective").target
        if not isinstance(target, EpsilonTarget):
            raise ConfigError(
                f"{each.origin}: was trained with objective.target={type(target).__name__}, and diffusers' pipelines "
                "of the cascade sample what predicts noise. Name one that was trained with objective=gdf."
            )
    codec = build_component(decoder.cfg, "model").stage_a
    if not isinstance(codec, VQGAN):
        raise ConfigError(
            f"{decoder.origin}: decodes by {type(codec).__name__}, which no pipeline of diffusers has. Name a Stage B "
            "on a VQGAN, such as one of model=b_tiny."
        )


def _stored(model: TrainedModel, stage: DenoisingStage, dtype: str | None) -> dict[str, Tensor]:
    """Return a stage's weights as they are stored, which is not always how they compute."""
    source = model.cfg.model.weights if model.export is None else str(model.export)
    network = build_plain_network(network_config(stage.network), None)
    key = model.origin.partition("=")[0]
    return load_state(network, source, dtype=DTYPES.get(dtype or ""), key=key, part=stage.part)
