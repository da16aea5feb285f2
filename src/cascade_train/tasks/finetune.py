"""Training of every weight of a stage's network; of a text-to-image network, `Finetune`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import read_network
from cascade_train.models.formats.weights_source import find_part
from cascade_train.models.stage import Stage
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.tasks.base import Export
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
        """Text towers that train."""
        return self._trained

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage and unfreeze its network, with the network's own dropout."""
        super().attach(stage, objective, device)
        stage.network.requires_grad_(requires_grad=True).train()
        for encoder in self.trained_towers().values():
            encoder.unfreeze()
            self.trains_conditions = True

    def trained_towers(self) -> dict[str, TextEncoder]:
        """Text towers that train, by name."""
        return {name: encoder for name, encoder in self.stage.text_encoders().items() if encoder.train}

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size, in any format that `model.weights` takes."""
        if self.trained_towers():
            raise ConfigError(f"ema.weights={source}: has no average of the text towers, which train; leave it null")
        read = read_network(self.stage.network, source, key="ema.weights", part=self.stage.part)
        return ((f"network.{name}", value) for name, value in read)

    def exports(self) -> Mapping[str, Export]:
        """Stage's exports."""
        module = nn.ModuleDict(self._roots()) if self.trained_towers() else self.stage.network
        return {name: Export(module=module, write=save, whole=True) for name, save in self.stage.exports().items()}

    def load_export(self, export: Path) -> None:
        """Load the text towers that trained; the stage loads the network, as its weights."""
        for name, encoder in self.trained_towers().items():
            encoder.load(str(find_part(export, name, "from")))


class Finetune(WholeNetwork):
    """Trains every weight of a text-to-image network."""

    fits = ("text_to_image",)
