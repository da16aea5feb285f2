"""Full training of Stage C's network on captioned images.

Lives here: what is left behind. Must not live here: what trains (whole_network.py) and the loss (text_to_image.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from cascade_train.models.formats.export import prior_parts, save_prior
from cascade_train.models.stage_c import StageC
from cascade_train.tasks.base import Export
from cascade_train.tasks.whole_network import WholeNetwork


class Finetune(WholeNetwork):
    """Trains every weight of Stage C's network; encoders stay frozen."""

    fits = ("stage_c",)
    part = "prior"

    def exports(self) -> Mapping[str, Export]:
        """Return `prior`, a folder that diffusers' prior pipeline loads."""
        return {self.part: Export(module=self.stage.network, write=self._write_prior)}

    def _write_prior(self, state: Mapping[str, Tensor], directory: Path) -> float:
        if not isinstance(self.stage, StageC):
            raise AssertionError(f"a prior is made of Stage C, not of {self.stage.name}")
        return save_prior(state, prior_parts(self.stage), directory).max_error
