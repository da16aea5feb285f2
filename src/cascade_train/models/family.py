"""The contract of a model family: what all its stages share, and the rest of the program asks for.

A family is one object that its stages name. Must not live here: what a stage does (stage.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from cascade_train.errors import ConfigError


class Family:
    """A family of models, without state.

    Attributes:
        tag: its name on the hub.
        uses: a sentence on what an export is and what loads it, by the export's name; for model cards.
        in_diffusers: exports that a pipeline or model class of diffusers loads.
        pipelines: classes of diffusers' pipelines that are read as a folder; each with the option of `model=` whose
            sizes the folder's own replace.
    """

    tag: ClassVar[str]
    uses: ClassVar[Mapping[str, str]]
    in_diffusers: ClassVar[frozenset[str]]
    pipelines: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def stored_pipeline(self, folder: Path, model: str) -> tuple[list[str], dict[str, Any]]:
        """Return how a training of a pipeline's folder is composed: overrides, and values by dotted key.

        `model` is the value of `pipelines` for its class.

        Raises:
            ConfigError: a part or a configuration that is not there, or an architecture that is not built here.
        """
        raise AssertionError(f"{self.tag} reads no pipeline whole")

    def save_single_file(self, folder: Path, out: Path, *, dtype: torch.dtype | None) -> float:
        """Write a folder of one of `pipelines` as one file, replacing `out`; return the largest relative difference.

        `dtype` None = that of the stored weights.

        Raises:
            ConfigError: no such file for this pipeline.
            RunError: what was written reads back differently.
        """
        raise ConfigError(f"format=single_file: pipelines of {self.tag} are not written as one file. Leave it out.")
