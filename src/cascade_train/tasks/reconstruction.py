"""Training of what turns latents back into images: Stage B's network, or Stage A's.

Lives here: which of the two tasks it is, and what Stage B leaves behind. Must not live here: what trains
(whole_network.py, autoencoding.py), the losses (text_to_image.py, vqgan.py), and the conditions, which are the stage's
(models/stage_b.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.export_decoder import decoder_parts, save_decoder
from cascade_train.models.stage_b import StageB
from cascade_train.tasks.autoencoding import Autoencoding
from cascade_train.tasks.base import Export, Task
from cascade_train.tasks.vqgan import Vqgan
from cascade_train.tasks.whole_network import WholeNetwork

COND_DROP_PROB = 0.05
"""Share of captions that Stage B's training replaces by the empty one, as in the original."""


class Reconstruction(WholeNetwork):
    """Trains every weight of Stage B's network to reconstruct images from their semantic latents and captions.

    With `objective=vqgan`, it trains Stage A.

    Args:
        cond_drop_prob: share of samples whose caption is replaced by the empty one, in [0, 1]; null = 0.05. Stage A
            sees no captions.
        image_keep_prob: share of samples whose own image is a condition, in [0, 1], the others get zeros; null = the
            stage's, 0.9. Stage A has no conditions.

    Raises:
        ValueError: a share outside [0, 1].
    """

    fits = ("stage_a", "stage_b")
    part = "decoder"

    def __init__(self, *, cond_drop_prob: float | None, image_keep_prob: float | None) -> None:
        super().__init__(
            cond_drop_prob=COND_DROP_PROB if cond_drop_prob is None else cond_drop_prob, image_keep_prob=image_keep_prob
        )
        self._given = {"cond_drop_prob": cond_drop_prob, "image_keep_prob": image_keep_prob}

    def suited(self, objective: Any) -> Task:
        """Return the training of Stage A where the objective is for it; else this.

        Raises:
            ConfigError: an option that means nothing for Stage A.
        """
        if not isinstance(objective, Vqgan):
            return self
        for key, value in self._given.items():
            if value is not None:
                raise ConfigError(f"task.{key}={value}: Stage A sees neither captions nor conditions; leave it null")
        return Autoencoding(objective)

    def exports(self) -> Mapping[str, Export]:
        """Return `decoder`, a folder that diffusers' decoder pipeline loads."""
        return {self.part: Export(module=self.stage.network, write=self._write_decoder)}

    def _write_decoder(self, state: Mapping[str, Tensor], directory: Path) -> float:
        if not isinstance(self.stage, StageB):
            raise AssertionError(f"a decoder is made of Stage B, not of {self.stage.name}")
        return save_decoder(state, decoder_parts(self.stage), directory).max_error
