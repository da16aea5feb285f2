"""Stages A, B and C out in one folder that diffusers' combined pipeline loads, read back before it counts.

Takes plain state dicts on one process. Must not live here: the two pipelines in it (export.py, export_decoder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diffusers import StableCascadeCombinedPipeline
from torch import Tensor

from cascade_train.models.formats.export import (
    Exported,
    PriorParts,
    build_plain_network,
    prior_pipeline,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.formats.export_decoder import DecoderParts, decoder_pipeline, name_its_module


def save_combined(
    prior_state: Mapping[str, Tensor],
    prior: PriorParts,
    decoder_state: Mapping[str, Tensor],
    decoder: DecoderParts,
    directory: Path,
) -> Exported:
    """Write a folder that `StableCascadeCombinedPipeline.from_pretrained` loads, replacing `directory` at once.

    That pipeline knows one compression, of 42.67 pixels for each of Stage C's latent positions, whatever the stages
    were trained with.

    Args:
        prior_state: Stage C's whole state dict with diffusers' keys, on the host, in the dtype to be written.
        prior: the rest of its pipeline.
        decoder_state: Stage B's, likewise.
        decoder: the rest of its pipeline, Stage A among it.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    if decoder.vqgan is None:
        raise AssertionError("a Stage A that no pipeline has is refused before")
    first = build_plain_network(prior.network_config, prior_state)
    second = build_plain_network(decoder.network_config, decoder_state)
    with replaced_directory(directory) as partial, quiet():
        of_prior, of_decoder = (
            prior_pipeline(first, prior).components,
            decoder_pipeline(second, decoder, decoder.vqgan).components,
        )
        named = {f"prior_{name}": part for name, part in of_prior.items()}
        StableCascadeCombinedPipeline(**of_decoder, **named).save_pretrained(partial)
        name_its_module(partial / "model_index.json", decoder.vqgan)
        errors = [
            read_back_error(n, partial / part, directory) for n, part in ((first, "prior_prior"), (second, "decoder"))
        ]
    return Exported(path=directory, max_error=max(errors))
