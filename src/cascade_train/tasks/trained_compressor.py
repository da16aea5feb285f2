"""A semantic compressor that trains along with what reads its latents: its place in the phase and in the export."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from cascade_train.models.formats.export_part import save_part
from cascade_train.tasks.base import Export, Phase

COMPRESSOR = "semantic_compressor"
"""What the compressor is called among the stage's parts, the phase's modules and the exports."""


def with_compressor(phase: Phase, compressor: nn.Module) -> Phase:
    """Return the phase with the compressor as a further root."""
    units = {**phase.units, COMPRESSOR: [[child] for child in compressor.children()]}
    return replace(phase, modules={**phase.modules, COMPRESSOR: compressor}, units=units)


def compressor_export(compressor: nn.Module) -> dict[str, Export]:
    """Return `semantic_compressor`, which `model.semantic_compressor.weights` takes."""
    return {COMPRESSOR: Export(module=compressor, write=save_part)}
