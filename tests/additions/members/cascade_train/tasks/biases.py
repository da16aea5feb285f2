"""Training of the biases alone (Ben Zaken et al. 2022, BitFit)."""

from __future__ import annotations

from typing import Any

import torch

from cascade_train.models.stage import Stage
from cascade_train.tasks.finetune import Finetune


class Biases(Finetune):
    """Trains every bias of Stage C's network; all other weights stay as they are."""

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        super().attach(stage, objective, device)
        for name, parameter in stage.network.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
