"""Training of every weight of a stage's network; of one that paints from captions alone, `Finetune`.

Must not live here: the loss (text_to_image.py), and how a network is written for other programs (the stage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import read_network
from cascade_train.models.formats.weights_source import find_part
from cascade_train.models.stage import Stage
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.tasks.base import Export, Phase
from cascade_train.tasks.text_to_image import TextToImage


class WholeNetwork(TextToImage):
    """Trains every weight of the network, and of the text towers whose `train` is true; other encoders stay frozen."""

    trains_network = True
    _trained: frozenset[str] = frozenset()

    def check_stage(self, stage: Stage) -> None:
        """Look up which text towers train."""
        self._trained = frozenset(name for name, encoder in stage.text_encoders().items() if encoder.train)
        super().check_stage(stage)

    def trained_parts(self) -> frozenset[str]:
        """Return the text towers that train."""
        return self._trained

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage and let every weight of its network train, with the network's own dropout."""
        super().attach(stage, objective, device)
        stage.network.requires_grad_(requires_grad=True).train()
        for encoder in self._towers().values():
            encoder.unfreeze()
            self.trains_conditions = True

    def _towers(self) -> dict[str, TextEncoder]:
        return {name: encoder for name, encoder in self.stage.text_encoders().items() if encoder.train}

    def phases(self) -> list[Phase]:
        """Return the one phase, whose roots are the network and the text towers that train."""
        (phase,), towers = super().phases(), self._towers()
        return [
            replace(
                phase,
                modules={**phase.modules, **{name: encoder.module for name, encoder in towers.items()}},
                units={**phase.units, **{name: encoder.units() for name, encoder in towers.items()}},
                lrs={name: encoder.lr for name, encoder in towers.items() if encoder.lr is not None},
            )
        ]

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size, in any format that `model.weights` takes."""
        if self._towers():
            raise ConfigError(f"ema.weights={source}: has no average of the text towers, which train; leave it null")
        read = read_network(self.stage.network, source, key="ema.weights", part=self.stage.part)
        return ((f"network.{name}", value) for name, value in read)

    def exports(self) -> Mapping[str, Export]:
        """Return what the stage writes of its network, see `Stage.exports`."""
        towers, module = self._towers(), self.stage.network
        if towers:
            module = nn.ModuleDict({"network": module, **{name: each.module for name, each in towers.items()}})
        return {name: Export(module=module, write=save, whole=True) for name, save in self.stage.exports().items()}

    def load_export(self, export: Path) -> None:
        """Load the text towers that trained; the network is found by the stage, as its weights."""
        for name, encoder in self._towers().items():
            encoder.load(str(find_part(export, name, "from")))


class Finetune(WholeNetwork):
    """Trains every weight of a network that paints from captions alone."""

    fits = ("text_to_image",)
