"""Low-rank adapters on a frozen Stage C network, trained on captioned images.

Lives here: what trains and what is left behind. Must not live here: the loss (text_to_image.py) and what an adapter is
(models/lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective
from cascade_train.models.export import network_config, save_lora
from cascade_train.models.lora import LoraSpec, adapter_state, inject_lora, lora_spec, set_adapter_mode
from cascade_train.models.lora_files import refill_lora
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Export
from cascade_train.tasks.text_to_image import TextToImage


class LoRA(TextToImage):
    """Trains adapters alone, fp32 on a frozen base; the base's dropout is off.

    Args:
        rank: of every adapter, >= 1.
        alpha: the adapters' output is scaled by alpha / rank, > 0.
        dropout: on the adapters' input, in [0, 1).
        module_filters: substrings (else regular expressions) of the names of the modules that get adapters, under
            diffusers' names or the original's; null = every linear and ungrouped convolution layer.
        seed: of the adapters' first values.
        cond_drop_prob: share of samples whose caption is replaced by the empty one, in [0, 1].
        image_keep_prob: share of samples whose own image embedding is a condition, in [0, 1]; the others get zeros.

    Raises:
        ValueError: a number out of range.
    """

    fits = ("stage_c",)
    trains_network = False

    def __init__(
        self,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        module_filters: list[str] | None,
        seed: int,
        cond_drop_prob: float,
        image_keep_prob: float,
    ) -> None:
        super().__init__(cond_drop_prob=cond_drop_prob, image_keep_prob=image_keep_prob)
        if rank < 1:
            raise ValueError(f"rank={rank}: an adapter needs at least one column, give 1 or more")
        if alpha <= 0:
            raise ValueError(f"alpha={alpha}: the adapters' scale is alpha / rank, give a number above 0")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}: is a probability on the adapters' input, give 0 or more, below 1")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.module_filters = module_filters
        self.seed = seed
        self._spec: LoraSpec

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage, freeze its network and give the selected modules adapters.

        Raises:
            ConfigError: a module filter that selects nothing.
        """
        super().attach(stage, objective, device)
        inject_lora(
            stage.network,
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            module_filters=self.module_filters,
            seed=self.seed,
        )
        set_adapter_mode(stage.network)
        self._spec = lora_spec(stage.network)

    def exports(self) -> Mapping[str, Export]:
        """Return `lora`, a peft folder with a single file beside it."""
        return {"lora": Export(module=self.stage.network, write=self._write_lora)}

    def load_export(self, export: Path) -> None:
        """Give the adapters the values that a run left in `export/lora`.

        Raises:
            ConfigError: no adapters there, or others than the task's.
        """
        refill_lora(self.stage.network, str(export), key="from")

    def _write_lora(self, state: Mapping[str, Tensor], directory: Path) -> float:
        config = network_config(self.stage.network)
        return save_lora(adapter_state(state), self._spec, config, directory, metadata={}).max_error
