"""Copies of a state on a CUDA device: pinned, kept, and of the moment at which they were taken."""

from __future__ import annotations

import pytest
import torch

from cascade_train.engine.checkpoint.writing import HostMemory

pytestmark = pytest.mark.gpu


def test_copies_are_pinned_kept_and_of_their_moment() -> None:
    memory = HostMemory()
    state = {"weight": torch.arange(100_000.0, device="cuda"), "on_host": torch.ones(3), "lr": 0.1}
    first = memory.take(state)
    state["weight"].zero_()
    assert first["weight"].is_pinned()
    assert torch.equal(first["weight"], torch.arange(100_000.0))
    assert (torch.equal(first["on_host"], torch.ones(3)), first["lr"]) == (True, 0.1)
    assert memory.take(state)["weight"] is first["weight"]
    assert not first["weight"].any()
