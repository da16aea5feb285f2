"""xformers on a CUDA device: its attention equals torch's, and a run trains with it."""

from __future__ import annotations

import pytest
import torch

from tests.integration.runs import read_metrics, train

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("xformers.ops", reason="needs cascade-train[xformers] beside a torch that it was built for")


def test_attention_of_xformers_equals_that_of_torch() -> None:
    from cascade_train.models.networks.block_network import _sdpa, _xformers

    query, key, value = torch.randn(3, 2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(_xformers(query, key, value, 0.0), _sdpa(query, key, value, 0.0), atol=2e-2, rtol=2e-2)


def test_a_run_with_xformers_learns_what_one_without_learns(tmp_path) -> None:
    shared = ("task=finetune", "train.precision=bf16", "data.num_workers=0", "model.network.dropout=[0.0,0.0]")
    plain = read_metrics(train(tmp_path / "sdpa", *shared, "attention=sdpa"))
    ours = read_metrics(train(tmp_path / "xformers", *shared, "attention=xformers"))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in plain], rel=2e-2)
