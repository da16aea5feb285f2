"""Training of what turns semantic latents back into images: Stage B's network.

Lives here: what is left behind. Must not live here: what trains (whole_network.py), the loss (text_to_image.py), and
the conditions, which are the stage's (models/stage_b.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from cascade_train.models.export_decoder import decoder_parts, save_decoder
from cascade_train.models.stage_b import StageB
from cascade_train.tasks.base import Export
from cascade_train.tasks.whole_network import WholeNetwork


class Reconstruction(WholeNetwork):
    """Trains every weight of Stage B's network to reconstruct images from their semantic latents and captions."""

    fits = ("stage_b",)
    part = "decoder"

    def exports(self) -> Mapping[str, Export]:
        """Return `decoder`, a folder that diffusers' decoder pipeline loads."""
        return {self.part: Export(module=self.stage.network, write=self._write_decoder)}

    def _write_decoder(self, state: Mapping[str, Tensor], directory: Path) -> float:
        if not isinstance(self.stage, StageB):
            raise AssertionError(f"a decoder is made of Stage B, not of {self.stage.name}")
        return save_decoder(state, decoder_parts(self.stage), directory).max_error
