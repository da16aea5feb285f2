"""Parts of diffusers' pipelines on the host, of built stages: what all families' pipelines hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.models.formats.weights import copy_to
from cascade_train.models.text_encoder import TextEncoder


def copy_on_host(tower: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a CLIP tower on the host, in the network's dtype, as pipelines need it."""
    return tower_of(tower, tower.state_dict(), dtype)


def tower_of(tower: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return a CLIP tower like another one, with copies of these tensors in a dtype on the host."""
    with torch.device("meta"):
        copied = type(tower)(tower.config)
    values = {name: copy_to(value, dtype, torch.device("cpu")) for name, value in state.items()}
    copied.load_state_dict(values, strict=True, assign=True)
    return copied.eval()


def on_host(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of a module's tensors in a dtype on the host, by name."""
    return {name: copy_to(value, dtype, torch.device("cpu")) for name, value in module.state_dict().items()}


def tokenizer_of_length(encoder: TextEncoder) -> Any:
    """Return a copy of the tokenizer that pads to `max_tokens`: the pipeline has no other place for that length."""
    copied = copy.deepcopy(encoder.tokenizer)
    copied.model_max_length = encoder.max_tokens
    return copied
