"""Parts of diffusers' pipelines on the host, of built stages: what all families' pipelines hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.models.formats.export import module_around
from cascade_train.models.formats.weights import copy_to
from cascade_train.models.text_encoder import TextEncoder


def copy_on_host(tower: Any, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> Any:
    """Return a copy of a CLIP tower on the host, as pipelines need it, with other values if they are given."""
    return module_around(lambda: type(tower)(tower.config), on_host(tower, dtype, state))


def on_host(module: nn.Module, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of a module's tensors, or of other values for it, in a dtype on the host, by name."""
    values = module.state_dict() if state is None else state
    return {name: copy_to(value, dtype, torch.device("cpu")) for name, value in values.items()}


def tokenizer_of_length(encoder: TextEncoder) -> Any:
    """Return a copy of the tokenizer that pads to `max_tokens`: the pipeline has no other place for that length."""
    copied = copy.deepcopy(encoder.tokenizer)
    copied.model_max_length = encoder.max_tokens
    return copied
