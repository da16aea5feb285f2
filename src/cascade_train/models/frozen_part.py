"""Bases of the frozen parts of a stage: their modules, and the values of these.

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.family import Family
from cascade_train.models.formats.weights import check_dtypes, load_module, put_tensors
from cascade_train.models.formats.weights_source import (
    CONFIG_FILES,
    SINGLE_FILE_SUFFIXES,
    WeightsSpec,
    find_part,
    hub_files,
    local_path,
)
from cascade_train.models.initialize import FROZEN_SEED, convolution_rule, initialise, tower_rule
from cascade_train.options import File, check_blocks


class FrozenPart(abc.ABC):
    """A frozen convolutional module in fp32. The constructor is cheap; `build` makes the module.

    Args:
        weights: a safetensors file, a run or folder that holds the part in a folder of its name, or
            `owner/name[@revision]:file` on the hub; null = values from a fixed seed.

    Attributes:
        key: name below `model.`.
        folder: the part's folder in runs, exports and pipelines.
        module: exists after `build`, in eval mode and without gradients.
    """

    key: ClassVar[str]
    folder: ClassVar[str]
    module: Any

    def __init__(self, *, weights: File[str | None]) -> None:
        self.weights = weights

    def forget_weights(self) -> None:
        """Replace the named weights by values from a fixed seed."""
        self.weights = None

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files that `build` loads."""
        if self.weights is None:
            return []
        return [WeightsSpec(key=f"model.{self.key}.weights", source=self.weights, part=self.folder)]

    def build(self, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Make the module on `device`, with the values of `weights` or of a fixed seed.

        A ConfigError for weights that do not exist or belong to another module.
        """
        with torch.device("meta"):
            module, gain = self._make()
        if self.weights is None:
            initialise(module, convolution_rule(gain), device=device, dtype=dtype, seed=FROZEN_SEED)
        else:
            self._load(module, self.weights, key=f"model.{self.key}.weights", device=device, dtype=dtype)
        self.module = module.eval().requires_grad_(False)

    def _load(self, module: nn.Module, weights: str, **where: Any) -> None:
        load_module(module, weights, part=self.folder, **where)

    @abc.abstractmethod
    def _make(self) -> tuple[nn.Module, float]:
        """Return the module, and the gain of seeded values at which activations keep their scale."""


class LatentCodec(FrozenPart):
    """A frozen map between images and latents.

    Attributes:
        latent_channels: channels of the latent.
        stride: image pixels for each latent position.
        in_pipelines: whether diffusers' pipelines use it.
    """

    in_pipelines: ClassVar[bool] = False
    latent_channels: int
    stride: int

    @abc.abstractmethod
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to latents (B, C, ...) fp32. Without gradient. Must not sync."""

    @abc.abstractmethod
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W) to (B, 3, stride H, stride W) fp32, not clamped. Without gradient."""


@dataclass(kw_only=True, eq=False)
class FrozenTower:
    """A frozen tower of transformers.

    Args:
        weights: hub id (`owner/name[@revision]`) or local folder of transformers, a run, or a file of a whole model;
            null = values from a fixed seed.
        subfolder: folder within `weights`; null = its root.

    Attributes:
        key: name below `model.`.
        family: of the stage; set before `build`.
        module: exists after `build`, in eval mode and without gradients.
    """

    key: ClassVar[str]

    weights: File[str | None]
    subfolder: str | None

    def __post_init__(self) -> None:
        self.family: Family
        self.module: Any

    def forget_weights(self) -> None:
        """Replace the named weights by values from a fixed seed."""
        self.weights = self.subfolder = None

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files that `build` loads."""
        if self.weights is None:
            return []
        key = f"model.{self.key}.weights"
        if self.weights.endswith(SINGLE_FILE_SUFFIXES):
            return [WeightsSpec(key=key, source=self.weights)]
        return [WeightsSpec(key=key, source=self.weights, part=self.subfolder, beside=CONFIG_FILES)]

    def _make(self, kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Make the tower of a transformers class on `device`; `config` is that of a tower without weights."""
        key = f"model.{self.key}.weights"
        if self.weights is None or self.weights.endswith(SINGLE_FILE_SUFFIXES):
            with torch.device("meta"):
                module = kind(config)
        if self.weights is None:
            initialise(module, tower_rule, device=device, dtype=dtype, seed=FROZEN_SEED)
            module.tie_weights()
        elif self.weights.endswith(SINGLE_FILE_SUFFIXES):
            values = self.family.read_text_tower(self.weights, module, part=self.key)
            put_tensors(module, values, dtype=dtype, device=device, origin=f"{key}={self.weights}")
        else:
            try:
                folder, subfolder = local_folder(FrozenTower.weight_specs(self)[0])
                module = kind.from_pretrained(folder, dtype=dtype, subfolder=subfolder, device_map={"": device})
                check_dtypes(f"{folder}/{subfolder}", key=key)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{self.key}.weights={self.weights}: is neither a local folder nor a hub id that can be reached; "
                    f"null takes seeded values ({error})"
                ) from error
        self.module = module.eval().requires_grad_(False)


@dataclass(kw_only=True, eq=False)
class ClipTower(FrozenTower):
    """A frozen tower of CLIP with projection.

    Args:
        hidden_size: width of the tokens.
        intermediate_size: width inside the feed-forward layers.
        num_hidden_layers: number of layers.
        num_attention_heads: heads of each layer.
        projection_dim: width of the embedding.
        hidden_act: activation by its transformers name.

    Raises:
        ValueError: heads that do not divide the width.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    projection_dim: int | None
    hidden_act: str

    def __post_init__(self) -> None:
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{self.key}.num_attention_heads={self.num_attention_heads}: must divide "
                f"{self.key}.hidden_size={self.hidden_size}"
            )
        check_blocks(f"{self.key}.num_hidden_layers", self.num_hidden_layers)
        own = [field.name for field in fields(ClipTower) if field.name not in ("weights", "subfolder")]
        self.sizes = {name: getattr(self, name) for name in own}
        super().__post_init__()


def local_folder(spec: WeightsSpec) -> tuple[str, str]:
    """Return the folder and subfolder of a spec for transformers, of the hub those in the cache."""
    path = local_path(spec.source)
    if path.is_dir() and spec.part is not None:
        return str(find_part(path, spec.part, spec.key)), ""
    if path.exists() or parse_source(spec.source) is None:
        return spec.source, spec.part or ""
    return str(hub_files(spec)[0].parent), ""
