"""What the frozen maps between images and latents have in common: where their values come from, and how they are made.

Lives here: that alone. Must not live here: what each of them maps (semantic_compressor.py, previewer.py,
latent_codec.py), and the CLIP towers, which have tokenizers and dtypes of their own.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cascade_train.models.formats.weights import load_module
from cascade_train.models.initialize import FROZEN_SEED, convolution_rule, initialise


class FrozenPart(abc.ABC):
    """A frozen module in fp32. The constructor is cheap; `build` makes the module.

    Attributes:
        weights: where its values come from; None = a fixed seed, or a module without any.
        module: the frozen module; exists after `build`.
    """

    weights: str | None = None
    module: Any

    def forget_weights(self) -> None:
        """Take values from a fixed seed, whatever was named."""
        self.weights = None

    @abc.abstractmethod
    def build(self, *, device: torch.device) -> None:
        """Make the module on `device`, in eval mode and without gradients.

        Raises:
            ConfigError: weights that do not exist or belong to another module.
        """

    def _fill(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        name: str,
        gain: float,
        part: str | None = None,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take a convolutional module from the meta device, with the values of `weights`, or of a fixed seed.

        Args:
            module: becomes the part's own, in fp32.
            device: where to.
            name: of the part, its key below `model.`.
            gain: of the seeded values, so that activations keep their scale (see `convolution_rule`).
            part: the folder in runs, exports and pipelines that holds it; None = `name`.
            renamed: see `load_module`.

        Raises:
            ConfigError: weights that do not exist or belong to another module.
        """
        if self.weights is None:
            initialise(module, convolution_rule(gain), device=device, dtype=torch.float32, seed=FROZEN_SEED)
        else:
            key, folder = f"model.{name}.weights", name if part is None else part
            load_module(module, self.weights, dtype=torch.float32, device=device, key=key, part=folder, renamed=renamed)
        self.module = module.eval().requires_grad_(False)
