"""What the frozen maps between images and latents have in common: where their values come from, and how they are made.

Lives here: that alone. Must not live here: what each of them maps (semantic_compressor.py, previewer.py,
latent_codec.py), and the CLIP towers, which have tokenizers and dtypes of their own.
"""

from __future__ import annotations

import abc
from typing import Any

import torch


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
