from __future__ import annotations

import pickle

import torch

from cascade_train.batch import Batch


def batch(side: int) -> Batch:
    return Batch(
        image_BCHW=torch.arange(2 * 3 * side * side, dtype=torch.int64).remainder(256).byte().reshape(2, 3, side, side),
        captions=("a", "b"),
        keys=("k", "l"),
        epoch_B=torch.tensor([0, 1]),
        index_B=torch.tensor([5, 6]),
        seed=3,
        weight_B=torch.tensor([1.0, 0.5]),
        tensors={"mask": torch.ones(2, 1, 4, 4, dtype=torch.uint8), "latent": torch.ones(2, 4, dtype=torch.bfloat16)},
    )


def test_a_batch_crosses_processes_whole() -> None:
    sent = batch(side=8)
    got = pickle.loads(pickle.dumps(sent))
    assert (got.captions, got.keys, got.seed, got.crop_B4) == (sent.captions, sent.keys, 3, None)
    for name in ("image_BCHW", "epoch_B", "index_B", "weight_B"):
        assert torch.equal(getattr(got, name), getattr(sent, name)), name
        assert getattr(got, name).dtype == getattr(sent, name).dtype
    assert got.tensors.keys() == sent.tensors.keys()
    assert all(torch.equal(got.tensors[name], sent.tensors[name]) for name in sent.tensors)
    got.index_B[0] = 7  # without torch's warning of memory that cannot be written to


def test_only_large_tensors_are_shared_between_processes() -> None:
    """Each shared tensor costs the main process a connection."""
    small, large = (batch(side).__getstate__() for side in (8, 128))
    assert [name for name, value in small.items() if isinstance(value, torch.Tensor)] == []
    assert [name for name, value in large.items() if isinstance(value, torch.Tensor)] == ["image_BCHW"]
    assert isinstance(small["tensors"]["latent"], torch.Tensor)  # bfloat16, which NumPy does not know
