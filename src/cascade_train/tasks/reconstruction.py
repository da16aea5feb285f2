"""Training of what turns latents back into images: Stage B's network, Stage A's, or Stage C's previewer.

Lives here: which of these tasks it is, and what Stage B leaves behind. Must not live here: what trains
(whole_network.py, autoencoding.py, previewing.py), the losses (text_to_image.py, vqgan.py, preview.py), and the
conditions, which are the stage's (models/stage_b.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.models.formats.export_decoder import decoder_parts, save_decoder
from cascade_train.models.formats.weights import load_module
from cascade_train.models.stage import Stage
from cascade_train.models.stage_b import StageB
from cascade_train.tasks.autoencoding import Autoencoding
from cascade_train.tasks.base import Export, Phase, Task
from cascade_train.tasks.preview import Preview
from cascade_train.tasks.previewing import Previewing
from cascade_train.tasks.trained_compressor import COMPRESSOR, compressor_export, with_compressor
from cascade_train.tasks.vqgan import Vqgan
from cascade_train.tasks.whole_network import WholeNetwork

COND_DROP_PROB = 0.05
"""Share of captions that Stage B's training replaces by the empty one, as in the original."""


class Reconstruction(WholeNetwork):
    """Trains every weight of Stage B's network to reconstruct images from their semantic latents and captions.

    With `objective=vqgan`, it trains Stage A; with `objective=preview`, Stage C's previewer. The semantic compressor
    may train along with Stage B, as in Würstchen (Pernias et al. 2023), or with a previewer: then it learns to keep
    what these need, and Stage C is trained on its latents afterwards.

    Args:
        cond_drop_prob: share of samples whose caption is replaced by the empty one, in [0, 1]; null = 0.05. For Stage
            B alone: the others see no captions.
        image_keep_prob: share of samples whose own image is a condition, in [0, 1], the others get zeros; null = the
            stage's, 0.9. For Stage B alone.
        train_compressor: for Stage B and previewers, whether the semantic compressor trains along; its norms keep
            their statistics. False = it stays as it is, which every published Stage C needs.

    Raises:
        ValueError: a share outside [0, 1].
    """

    fits = ("stage_a", "stage_b", "stage_c")
    reconstructs = ("stage_a", "stage_c")
    part = "decoder"

    def __init__(
        self, *, cond_drop_prob: float | None, image_keep_prob: float | None, train_compressor: bool = False
    ) -> None:
        super().__init__(
            cond_drop_prob=COND_DROP_PROB if cond_drop_prob is None else cond_drop_prob, image_keep_prob=image_keep_prob
        )
        self.train_compressor = train_compressor
        self._given = {
            "cond_drop_prob": cond_drop_prob,
            "image_keep_prob": image_keep_prob,
            "train_compressor": train_compressor or None,
        }

    def suited(self, objective: Any) -> Task:
        """Return the training of Stage A or of a previewer where the objective is for it; else this.

        Raises:
            ConfigError: an option that means nothing there.
        """
        if isinstance(objective, Vqgan):
            self._refuse("cond_drop_prob", "image_keep_prob", "train_compressor")
            return Autoencoding(objective)
        if isinstance(objective, Preview):
            self._refuse("cond_drop_prob", "image_keep_prob")
            return Previewing(objective, train_compressor=self.train_compressor)
        return self

    def _refuse(self, *keys: str) -> None:
        for key in keys:
            if self._given[key] is not None:
                raise ConfigError(
                    f"task.{key}={self._given[key]}: is for Stage B; what trains by this objective sees neither "
                    "captions nor conditions. Leave it out"
                )

    def trained_parts(self) -> frozenset[str]:
        """Return the semantic compressor where it trains along."""
        return frozenset({COMPRESSOR}) if self.train_compressor else frozenset()

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage, and let its compressor train if asked to."""
        super().attach(stage, objective, device)
        if self.train_compressor:
            self._compressor().requires_grad_(requires_grad=True)
            self.trains_conditions = True

    def phases(self) -> list[Phase]:
        """Return the one phase; the compressor is its second root where it trains."""
        phases = super().phases()
        if not self.train_compressor:
            return phases
        return [with_compressor(phase, self._compressor()) for phase in phases]

    def exports(self) -> Mapping[str, Export]:
        """Return `decoder`, a folder that diffusers' decoder pipeline loads, and a compressor that trained along."""
        exports = {self.part: Export(module=self.stage.network, write=self._write_decoder)}
        if self.train_compressor:
            exports |= compressor_export(self._compressor())
        return exports

    def initial_average(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of another network of this size.

        Raises:
            ConfigError: the compressor trains along, and no average of it is known.
        """
        if self.train_compressor:
            raise ConfigError(
                f"ema.weights={source}: holds no average of a compressor that trains along; leave ema.weights=null, or "
                "set task.train_compressor=false"
            )
        return super().initial_average(source)

    def load_export(self, export: Path) -> None:
        """Give a compressor that trained along the values that the run left.

        Raises:
            ConfigError: none there, or of another class.
        """
        if self.train_compressor:
            module = self._compressor()
            device = next(module.parameters()).device
            load_module(module, str(export), dtype=torch.float32, device=device, key="from", part=COMPRESSOR)

    def _compressor(self) -> nn.Module:
        return cast(nn.Module, cast(StageB, self.stage).semantic_compressor.module)

    def _write_decoder(self, state: Mapping[str, Tensor], directory: Path) -> float:
        if not isinstance(self.stage, StageB):
            raise AssertionError(f"a decoder is made of Stage B, not of {self.stage.name}")
        return save_decoder(state, decoder_parts(self.stage), directory).max_error
