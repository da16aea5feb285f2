"""Training of every weight of a stage's network; of Stage C's, `Finetune`.

Lives here: what trains, and what a run of Stage C exports. Must not live here: the loss (text_to_image.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective
from cascade_train.models.formats.export_pipelines import prior_parts, save_prior
from cascade_train.models.formats.weights import read_network
from cascade_train.models.stage import Stage
from cascade_train.models.stage_c import StageC
from cascade_train.tasks.base import Export
from cascade_train.tasks.text_to_image import TextToImage


class WholeNetwork(TextToImage):
    """Trains every weight of the network; encoders stay frozen.

    Attributes:
        part: name of the network's folder in a pipeline and in `export/`.
    """

    trains_network = True
    part: ClassVar[str]

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage and let every weight of its network train, with the network's own dropout."""
        super().attach(stage, objective, device)
        stage.network.requires_grad_(requires_grad=True).train()

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size, in any format that `model.weights` takes."""
        read = read_network(self.stage.network, source, key="ema.weights", part=self.part)
        return ((f"network.{name}", value) for name, value in read)


class Finetune(WholeNetwork):
    """Trains every weight of Stage C's network."""

    fits = ("stage_c",)
    part = "prior"

    def exports(self) -> Mapping[str, Export]:
        """Return `prior`, a folder that diffusers' prior pipeline loads."""
        return {self.part: Export(module=self.stage.network, write=self._write_prior, whole=True)}

    def _write_prior(self, state: Mapping[str, Tensor], directory: Path) -> float:
        if not isinstance(self.stage, StageC):
            raise AssertionError(f"a prior is made of Stage C, not of {self.stage.name}")
        return save_prior(state, prior_parts(self.stage), directory).max_error
