"""Training of every weight of a stage's network; of Stage C's and Stable Diffusion's, `Finetune`.

Must not live here: the loss (text_to_image.py), and how a network is written for other programs (the stage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective
from cascade_train.models.formats.weights import read_network
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Export
from cascade_train.tasks.text_to_image import TextToImage


class WholeNetwork(TextToImage):
    """Trains every weight of the network; encoders stay frozen."""

    trains_network = True

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage and let every weight of its network train, with the network's own dropout."""
        super().attach(stage, objective, device)
        stage.network.requires_grad_(requires_grad=True).train()

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size, in any format that `model.weights` takes."""
        read = read_network(self.stage.network, source, key="ema.weights", part=self.stage.part)
        return ((f"network.{name}", value) for name, value in read)

    def exports(self) -> Mapping[str, Export]:
        """Return what the stage writes of its network, see `Stage.exports`."""
        network = self.stage.network
        return {name: Export(module=network, write=save, whole=True) for name, save in self.stage.exports().items()}


class Finetune(WholeNetwork):
    """Trains every weight of the network of Stage C, or of Stable Diffusion's."""

    fits = ("stage_c", "stable_diffusion", "stable_diffusion_xl")
