"""What the frozen parts of a stage share: where their values come from, and how they are made.

Must not live here: what each of them maps (semantic_compressor.py, previewer.py, latent_codec.py, text_encoder.py,
image_encoder.py).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import load_module
from cascade_train.models.initialize import FROZEN_SEED, convolution_rule, initialise, tower_rule
from cascade_train.options import File


class FrozenPart(abc.ABC):
    """A frozen convolutional module in fp32. The constructor is cheap; `build` makes the module.

    Args:
        weights: a safetensors file, a run or folder that holds the part in a folder of its name, or `owner/name:file`
            on the hub; null = values from a fixed seed.

    Attributes:
        key: name below `model.`.
        folder: the part's folder in runs, exports and pipelines.
        renamed: prefixes of stored names -> what the module calls them.
        module: exists after `build`, in eval mode and without gradients.
    """

    key: ClassVar[str]
    folder: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    module: Any

    def __init__(self, *, weights: File[str | None]) -> None:
        self.weights = weights

    def forget_weights(self) -> None:
        """Take values from a fixed seed, whatever was named."""
        self.weights = None

    def build(self, *, device: torch.device) -> None:
        """Make the module on `device`, with the values of `weights` or of a fixed seed.

        Raises:
            ConfigError: weights that do not exist or belong to another module.
        """
        with torch.device("meta"):
            module, gain = self._make()
        if self.weights is None:
            initialise(module, convolution_rule(gain), device=device, dtype=torch.float32, seed=FROZEN_SEED)
        else:
            where = {"device": device, "key": f"model.{self.key}.weights", "part": self.folder}
            load_module(module, self.weights, dtype=torch.float32, renamed=self.renamed, **where)
        self.module = module.eval().requires_grad_(False)

    @abc.abstractmethod
    def _make(self) -> tuple[nn.Module, float]:
        """Return the module, and the gain of seeded values at which activations keep their scale."""


class ClipTower:
    """A frozen tower of CLIP with projection.

    Args:
        weights: hub id or local folder of transformers; null = values from a fixed seed.
        subfolder: folder within `weights`; null = its root.
        hidden_size: width of the tokens.
        intermediate_size: width inside the feed-forward layers.
        num_hidden_layers: number of layers.
        num_attention_heads: heads of each layer.
        projection_dim: width of the embedding.
        hidden_act: activation by its transformers name.

    Attributes:
        key: name below `model.`.
        module: exists after `build`, in eval mode and without gradients.

    Raises:
        ValueError: heads that do not divide the width.
    """

    key: str
    module: Any

    def __init__(
        self,
        key: str,
        *,
        weights: str | None,
        subfolder: str | None,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        projection_dim: int,
        hidden_act: str,
    ) -> None:
        if num_attention_heads < 1 or hidden_size % num_attention_heads:
            raise ValueError(
                f"{key}.num_attention_heads={num_attention_heads}: must divide {key}.hidden_size={hidden_size}"
            )
        self.key = key
        self.weights = weights
        self.subfolder = subfolder
        self.hidden_size = hidden_size
        self.projection_dim = projection_dim
        self.sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "projection_dim": projection_dim,
            "hidden_act": hidden_act,
        }

    def forget_weights(self) -> None:
        """Take values from a fixed seed, whatever was named."""
        self.weights = self.subfolder = None

    def _make(self, kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Make the tower of a transformers class on `device`; `config` is that of a tower without weights.

        Raises:
            ConfigError: weights that do not exist.
        """
        if self.weights is None:
            with torch.device("meta"):
                module = kind(config)
            initialise(module, tower_rule, device=device, dtype=dtype, seed=FROZEN_SEED)
        else:
            try:
                module = kind.from_pretrained(self.weights, subfolder=self.subfolder or "", dtype=dtype).to(device)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{self.key}.weights={self.weights}: is neither a local folder nor a hub id that can be reached; "
                    f"null takes seeded values ({error})"
                ) from error
        self.module = module.eval().requires_grad_(False)
