"""What the networks that diffusers builds have in common here: the choice of attention, and recomputation of blocks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from cascade_train.models.networks.attention import draws_random_numbers, set_attention


class BlockNetwork:
    """Mixed into a model of diffusers, before it."""

    enable_gradient_checkpointing: Any
    disable_gradient_checkpointing: Any

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel, see `attention.set_attention`."""
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
