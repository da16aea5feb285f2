"""Training of every weight of a stage's network: what finetuning and reconstruction share.

Lives here: what trains. Must not live here: the loss (text_to_image.py), and what a run leaves behind, which differs by
stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective
from cascade_train.models.formats.weights import read_network
from cascade_train.models.stage import Stage
from cascade_train.tasks.text_to_image import TextToImage


class WholeNetwork(TextToImage):
    """Trains every weight of the network; encoders stay frozen.

    Attributes:
        part: name of the folder that holds such a network in a pipeline and in `export/`.
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
