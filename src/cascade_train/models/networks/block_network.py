"""What networks of diffusers' blocks share: attention kernels by name, dropout in attention, recomputation of blocks.

Must not live here: the walk through a network.

Shape legend: B batch, C channels, H heads, H' W' latent size, N queries, M keys, D width of a head.
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, XFormersAttnProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cascade_train.errors import ConfigError, install_hint

if "xformers" in sys.modules and sys.modules["xformers"] is None:
    del sys.modules["xformers"]  # diffusers has decided to do without it; others may import it

PROCESSORS = {"sdpa": AttnProcessor2_0, "xformers": XFormersAttnProcessor, "math": AttnProcessor}
"""Attention kernels by the name that a user gives."""

PROBABILITY_DROPOUT = "probability_dropout"
"""Name of the dropout module, below an attention, whose probability acts on attention probabilities."""


def drop_probabilities(network: nn.Module) -> None:
    """Move the dropout of every attention from its output, where diffusers has it, to its probabilities.

    As in the original (Stable Cascade, modules/common.py). Without effect in eval mode; weights and their names stay.
    """
    for attention in _attentions(network):
        output = attention.to_out[1]
        attention.add_module(PROBABILITY_DROPOUT, nn.Dropout(output.p))
        output.p = 0.0
    set_attention(network, "sdpa")


def set_attention(network: nn.Module, name: str) -> None:
    """Choose the attention kernel of a network: "sdpa", "xformers" or "math".

    Raises:
        ConfigError: an unknown name, or xformers without a package that can be loaded, or a CUDA device.
    """
    if name not in PROCESSORS:
        raise ConfigError(f"attention={name}: must be one of {', '.join(PROCESSORS)}")
    if name == "xformers":
        _load_xformers()
        if not torch.cuda.is_available():
            raise ConfigError("attention=xformers: needs a CUDA device, and torch finds none; use attention=sdpa")
    for attention in _attentions(network):
        drops = PROBABILITY_DROPOUT in dict(attention.named_children())
        attention.set_processor(ProbabilityDropout(name) if drops else PROCESSORS[name]())


def _load_xformers() -> None:
    """Load xformers, and give it to diffusers, which was imported without it."""
    try:
        attention_processor.xformers = importlib.import_module("xformers")
        importlib.import_module("xformers.ops")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"attention=xformers: the package {error.name} is not installed. {install_hint('xformers')}, or choose "
            "attention=sdpa."
        ) from error
    except Exception as error:  # whatever a library that does not fit its machine raises
        raise ConfigError(
            f"attention=xformers: the package xformers is installed but cannot be loaded: {error}. Install one that "
            "fits this torch, or choose attention=sdpa."
        ) from error


def _attentions(network: nn.Module) -> list[Attention]:
    return [module for module in network.modules() if isinstance(module, Attention)]


class ProbabilityDropout:
    """Attention that zeroes probabilities in training; without dropout it is diffusers' processor to the bit."""

    def __init__(self, kernel: str) -> None:
        """Store; `kernel` is a name of `PROCESSORS`."""
        self._plain = PROCESSORS[kernel]()
        self._attend = _KERNELS[kernel]

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from a latent (B, C, H', W') to tokens (B, M, C); returns the latent's shape."""
        dropout = attn.get_submodule(PROBABILITY_DROPOUT)
        if not (isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0):
            return self._plain(attn, hidden_states, encoder_hidden_states, attention_mask)

        def split(x_BNC: Tensor) -> Tensor:
            return x_BNC.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        query_BHND = split(attn.to_q(hidden_states.flatten(2).transpose(1, 2)))
        key_BHMD, value_BHMD = split(attn.to_k(encoder_hidden_states)), split(attn.to_v(encoder_hidden_states))
        out_BHND = self._attend(query_BHND, key_BHMD, value_BHMD, dropout.p)
        out_BNC = attn.to_out[0](out_BHND.transpose(1, 2).flatten(2))
        return out_BNC.transpose(1, 2).reshape(hidden_states.shape)


def _sdpa(query_BHND: Tensor, key_BHMD: Tensor, value_BHMD: Tensor, p: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query_BHND, key_BHMD, value_BHMD, dropout_p=p)


def _math(query_BHND: Tensor, key_BHMD: Tensor, value_BHMD: Tensor, p: float) -> Tensor:
    scores_BHNM = query_BHND @ key_BHMD.transpose(-1, -2) / math.sqrt(query_BHND.shape[-1])
    return nn.functional.dropout(scores_BHNM.softmax(dim=-1), p) @ value_BHMD


def _xformers(query_BHND: Tensor, key_BHMD: Tensor, value_BHMD: Tensor, p: float) -> Tensor:
    from xformers.ops import memory_efficient_attention

    query_BNHD, key_BMHD, value_BMHD = (x.transpose(1, 2) for x in (query_BHND, key_BHMD, value_BHMD))
    return memory_efficient_attention(query_BNHD, key_BMHD, value_BMHD, p=p).transpose(1, 2)


_KERNELS = {"sdpa": _sdpa, "math": _math, "xformers": _xformers}


def draws_random_numbers(blocks: list[nn.Module]) -> bool:
    """Return whether a recomputation must replay the generator: only dropout draws, also an adapter's."""
    modules = [module for block in blocks for module in block.modules()]
    return any(isinstance(module, nn.Dropout) and module.p > 0 and module.training for module in modules)


class BlockNetwork:
    """Mixin of diffusers' models; comes before them."""

    enable_gradient_checkpointing: Any
    disable_gradient_checkpointing: Any

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel, see `set_attention`."""
        assert isinstance(self, nn.Module)
        set_attention(self, name)

    def set_recomputing(self, enabled: bool) -> None:
        """Recompute the blocks in backward instead of keeping their activations."""
        if enabled:
            self.enable_gradient_checkpointing(recomputed)
        else:
            self.disable_gradient_checkpointing()


def recomputed(module: nn.Module, *arguments: Any) -> Any:
    """Run a module of diffusers so that backward recomputes its activations; for `enable_gradient_checkpointing`."""
    keep_rng = draws_random_numbers([module])
    return checkpoint(module.__call__, *arguments, use_reentrant=False, preserve_rng_state=keep_rng)
