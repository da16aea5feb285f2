"""The contract of a model family: what its stages share. A family is one object that its stages and networks name."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.lora import StoredLora

Draw = Callable[..., Tensor]
"""Returns a fixed normal draw of a shape, in the dtype of a network."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Where a tensor of a module is stored: under which name and, for fused projections, in which third of the rows."""

    name: str
    third: int | None = None


NameLayout = Callable[[Iterable[str]], Mapping[str, Stored]]
"""Maps stored names to where each tensor of the module is stored."""


def own_names(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Lay out tensors that are stored under the module's own names."""
    return {name: Stored(name) for name in stored_names}


@dataclass(frozen=True)
class Spelling:
    """How other programs name adapted modules: prefixes, and a module's name -> theirs, with dots."""

    network: str
    text_encoder: str
    names: Mapping[str, str]


class Family(abc.ABC):
    """A family of models, without state.

    Attributes:
        tag: its name on the hub.
        parts: folders of pipelines and exports that hold a denoising network.
        uses: a sentence for model cards, by the export's name: what it is and what loads it.
        in_diffusers: exports that a pipeline or model class of diffusers loads.
        pipelines: classes of diffusers' pipelines that are read as a folder -> the option of `model=` to begin with.
        sizes: option of `model=` -> name of the published size.
        lora_root: the network's name in diffusers' files of adapters; None = its pipelines load none.
        lora_formats: formats of adapters, see `export_lora`.
    """

    tag: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    uses: ClassVar[Mapping[str, str]]
    in_diffusers: ClassVar[frozenset[str]]
    pipelines: ClassVar[Mapping[str, str]] = MappingProxyType({})
    sizes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    lora_root: ClassVar[str | None] = None
    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)

    @abc.abstractmethod
    def network_class(self) -> Any:
        """Return diffusers' own class of the denoising network."""

    @abc.abstractmethod
    def probe(self, config: Any, draw: Draw) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return small fixed inputs of a network of this diffusers config, by which exports are compared."""

    def layout(self, config: Mapping[str, Any]) -> NameLayout:
        """Return how the names of a stored network of this diffusers config become its own; by default they are."""
        return own_names

    def part_of(self, config: Mapping[str, Any]) -> str:
        """Return which of `parts` holds a network of this diffusers config."""
        return self.parts[0]

    def original_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a network's tensors under the original code's names; a ConfigError where there are none."""
        raise ConfigError(
            f"format=original: networks of {self.tag} have no such format; choose format=diffusers, and as out= of a"
            " merge a folder"
        )

    def size_of(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return the option of `model=` whose network has these tensors, one of `sizes`; None = another size."""
        return None

    def check_size(self, stored: str | None, wanted: str | None, what: str) -> None:
        """Refuse weights of another published size than the network's; None = of none. `what` begins the sentence."""
        if stored is not None and stored != wanted:
            is_now = self.sizes[wanted] if wanted is not None else "of another size"
            belongs = self.sizes.get(stored, stored)
            raise ConfigError(f"{what} {belongs}, but the network is {is_now}; use model={stored}")

    def adapter_size(self, shapes: Iterable[Shape]) -> tuple[str | None, int]:
        """Return the size whose widths stored adapters have, and the width that tells it; (None, 0) = none."""
        return None, 0

    def spelling(self, format: str, modules: Sequence[str]) -> Spelling:
        """Return how a format of `lora_formats` names the modules of a network, which are given in its order."""
        raise AssertionError(f"{format} is none of the formats of {self.tag}")

    def spellings(self, modules: Sequence[str]) -> list[Spelling]:
        """Return all ways in which files of adapters may name the modules of a network."""
        return []

    def read_numbered_lora(
        self,
        header: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        modules: Mapping[str, Shape],
        filters: Sequence[str] | None,
        origin: str,
    ) -> StoredLora | None:
        """Read adapters that are stored by position instead of name; None = they are not."""
        return None

    def write_numbered_lora(
        self, path: Path, lora: StoredLora, modules: Mapping[str, Shape], header: Mapping[str, str]
    ) -> None:
        """Write adapters by position, in the format "original"; a ConfigError for what has no place there."""
        raise AssertionError(f"adapters of {self.tag} are stored by name")

    def read_text_tower(self, source: str, module: nn.Module, *, part: str) -> dict[str, Tensor]:
        """Return a text tower's tensors from a file of a whole model, under `module`'s names; a ConfigError without."""
        raise ConfigError(
            f"model.{part}.weights={source}: text towers of {self.tag} are not read from one file; name a folder"
        )

    def model_spec(self, config: Mapping[str, Any], *, is_lora: bool, prediction: str | None) -> dict[str, str]:
        """Return the entries of a header that name a model of this diffusers config, see `export.model_spec`."""
        return {"modelspec.architecture": self.tag}

    def save_single_file(self, folder: Path, out: Path, *, dtype: torch.dtype | None, title: str) -> float:
        """Write a folder of one of `pipelines` as one file, replacing `out`; return the largest relative difference.

        `dtype` None = that of the stored weights; `title` is for the header. A ConfigError where the pipeline has no
        such file, a RunError where it reads back differently.
        """
        raise ConfigError(f"format=single_file: pipelines of {self.tag} are not written as one file. Leave it out.")
