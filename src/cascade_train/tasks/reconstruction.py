"""Training of what turns latents back into images: Stage B's network, or what an objective of pictures trains.

Must not live here: the loss (text_to_image.py), and what trains by other objectives (autoencoding.py, preview.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.models.formats.export import save_part
from cascade_train.models.formats.weights import load_module
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Export, Phase, Task
from cascade_train.tasks.finetune import WholeNetwork
from cascade_train.tasks.pictures import PictureObjective

COMPRESSOR = "semantic_compressor"
"""Name among the stage's parts, the phase's modules and the exports."""

COND_DROP_PROB = 0.05
"""Share of captions that Stage B's training replaces by the empty one, as in the original."""


class Reconstruction(WholeNetwork):
    """Trains every weight of Stage B's network to reconstruct images from their semantic latents and captions.

    An objective of pictures replaces this task by its own: `objective=vqgan` trains Stage A,
    `objective=autoencoder_kl` a KL autoencoder, `objective=preview` Stage C's previewer. The semantic
    compressor may train along with Stage B, as in Würstchen (Pernias et al. 2023), or with a previewer; Stage C is
    trained on its latents afterwards.

    Args:
        cond_drop_prob: share of samples whose caption is replaced by the empty one, in [0, 1]; null = 0.05. For Stage
            B alone: the others see no captions.
        image_keep_prob: share of samples whose own image is a condition, in [0, 1], the others get zeros; null = the
            stage's, 0.9. For Stage B alone.
        train_compressor: for Stage B and previewers, whether the semantic compressor trains along; its norms keep
            their statistics. False = it stays as it is, which every published Stage C needs.
    """

    fits = ("reconstruction", "vq_autoencoder", "kl_autoencoder", "previewer")
    reconstructs = ("vq_autoencoder", "kl_autoencoder", "previewer")

    def __init__(
        self, *, cond_drop_prob: float | None, image_keep_prob: float | None, train_compressor: bool = False
    ) -> None:
        self.cond_drop_prob = COND_DROP_PROB if cond_drop_prob is None else cond_drop_prob
        self.image_keep_prob = image_keep_prob
        super().__post_init__()
        self.train_compressor = train_compressor
        self._given = {
            "cond_drop_prob": cond_drop_prob,
            "image_keep_prob": image_keep_prob,
            "train_compressor": train_compressor or None,
        }

    def for_objective(self, objective: Any) -> Task:
        """Return the task of an objective of pictures, else this one; a ConfigError for options unknown there."""
        if not isinstance(objective, PictureObjective):
            return self
        for key, value in self._given.items():
            if value is not None and key not in objective.options:
                raise ConfigError(
                    f"task.{key}={value}: is for Stage B; what trains by this objective sees neither "
                    "captions nor conditions. Leave it out"
                )
        return objective.task(self)

    def trained_parts(self) -> frozenset[str]:
        """Return the semantic compressor where it trains along."""
        return frozenset({COMPRESSOR}) if self.train_compressor else frozenset()

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage; unfreeze its compressor if that trains."""
        super().attach(stage, objective, device)
        if self.train_compressor:
            self._compressor().requires_grad_(requires_grad=True)
            self.trains_conditions = True

    def phases(self) -> list[Phase]:
        """Return the one phase; the compressor is its second root where it trains."""
        [phase] = super().phases()
        if not self.train_compressor:
            return [phase]
        compressor = self._compressor()
        units = {**phase.units, COMPRESSOR: [[child] for child in compressor.children()]}
        return [replace(phase, modules={**phase.modules, COMPRESSOR: compressor}, units=units)]

    def exports(self) -> Mapping[str, Export]:
        """Return what Stage B writes of its network, and a compressor that trained along."""
        compressor = {COMPRESSOR: Export(module=self._compressor(), write=save_part)} if self.train_compressor else {}
        return {**super().exports(), **compressor}

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size; a ConfigError where the compressor trains along."""
        if self.train_compressor:
            raise ConfigError(
                f"ema.weights={source}: holds no average of a compressor that trains along; leave ema.weights=null, or "
                "set task.train_compressor=false"
            )
        return super().initial_average(source)

    def load_export(self, export: Path) -> None:
        """Load a compressor that trained along."""
        if self.train_compressor:
            module = self._compressor()
            device = next(module.parameters()).device
            load_module(module, str(export), dtype=torch.float32, device=device, key="from", part=COMPRESSOR)

    def _compressor(self) -> nn.Module:
        return cast(nn.Module, cast(Any, self.stage).semantic_compressor.module)
