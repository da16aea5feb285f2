"""Training of a network that reconstructs images from latents, or of what an objective of pictures trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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

    An objective of pictures replaces this task: `objective=vqgan` trains Stage A, `objective=autoencoder_kl` a KL
    autoencoder, `objective=preview` Stage C's previewer. The semantic compressor may train along with Stage B, as in
    Würstchen (Pernias et al. 2023), or with a previewer; Stage C is trained on its latents afterwards.

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
        """Task of an objective of pictures, else this one; a ConfigError for options unknown there."""
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
        """Semantic compressor where it trains along."""
        return frozenset({COMPRESSOR}) if self.train_compressor else frozenset()

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage; unfreeze its compressor if that trains."""
        super().attach(stage, objective, device)
        for compressor in self._parts().values():
            compressor.requires_grad_(requires_grad=True)
            self.trains_conditions = True

    def _parts(self) -> dict[str, nn.Module]:
        return parts_of(self.stage, self.trained_parts())

    def phases(self) -> list[Phase]:
        """The one phase; the compressor is its second root where it trains."""
        [phase] = super().phases()
        parts = self._parts()
        units = {**phase.units, **children(parts)}
        # the compressor runs once for each size of a micro-batch's shrunken images
        return [replace(phase, modules={**phase.modules, **parts}, units=units, gathered_whole=frozenset(parts))]

    def exports(self) -> Mapping[str, Export]:
        """Stage's exports, and a compressor that trained along."""
        return {**super().exports(), **part_exports(self._parts())}

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
        load_parts(self._parts(), export)


def parts_of(stage: Stage, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules of a stage's parts, by name."""
    return {name: getattr(stage, name).module for name in sorted(names)}


def children(parts: Mapping[str, nn.Module]) -> dict[str, list[list[nn.Module]]]:
    """Children of each part, which shard one by one, see `Phase.units`."""
    return {name: [[child] for child in module.children()] for name, module in parts.items()}


def part_exports(parts: Mapping[str, nn.Module]) -> dict[str, Export]:
    """Exports of parts that train, by name."""
    return {name: Export(module=module, write=save_part) for name, module in parts.items()}


def load_parts(parts: Mapping[str, nn.Module], export: Path) -> None:
    """Load parts in place from a run's `export/`."""
    for name, module in parts.items():
        device = next(module.parameters()).device
        load_module(module, str(export), dtype=torch.float32, device=device, key="from", part=name)
