"""What lives when: real tensors, views, in-place work, and storages that are resized."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cascade_train.assembly.planning.allocations import CUDA_BLOCK_BYTES, META, Allocations, ShapeCache


def test_a_storage_lives_from_the_operation_that_makes_it_to_the_one_after_its_end():
    with Allocations() as allocations:
        allocations.label = "first"
        first = torch.zeros(100)
        allocations.label = "second"
        second = first + 1
        view = second[:10]
        view.mul_(2)
        del first
        third = second.exp()
        del second, view
        torch.zeros(1)
    assert third.nbytes == 400
    curves = {name: curve.tolist() for name, curve in allocations.curves(1).items()}
    assert curves == {"first": [400, 400, 0, 0], "second": [0, 400, 800, 404]}


def test_sizes_are_rounded_up_to_blocks_and_labels_can_change():
    with Allocations(block_bytes=CUDA_BLOCK_BYTES) as allocations:
        allocations.label = "old"
        kept = torch.zeros(130)
        allocations.relabel("old", "new")
    assert kept.nbytes == 520
    assert {name: curve.tolist() for name, curve in allocations.curves(1).items()} == {"new": [1024]}


def test_a_storage_that_is_resized_has_its_new_size():
    with Allocations() as allocations:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        other = torch.zeros(50)
    assert other.nbytes == 200
    assert allocations.curves(1)[""].tolist() == [400, 200]


@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_of_convolutions_count_twice_their_forward(groups):
    with torch.device(META), Allocations(shapes=ShapeCache()) as allocations:
        allocations.counts_flops = True
        layer = torch.nn.Conv2d(8, 16, 3, padding=1, groups=groups)
        made = layer(torch.empty(2, 8, 5, 5, requires_grad=True))
        forward = allocations.flops
        made.sum().backward()
    assert forward == 2 * 2 * 16 * 5 * 5 * (8 // groups) * 9
    assert allocations.flops == 3 * forward


def test_operations_on_known_shapes_are_not_run_again_and_make_the_same():
    ran: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.empty(4, 6, device=META).t()
    with Counted(), ShapeCache():
        first, again = (torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5) for _ in range(2))
    assert ran.count("aten.native_layer_norm.default") == 1
    assert [(r.shape, r.stride(), r.dtype) for r in first] == [(r.shape, r.stride(), r.dtype) for r in again]
    assert again[0].untyped_storage()._cdata != first[0].untyped_storage()._cdata


def test_what_has_memory_is_changed_each_time_and_what_has_none_is_one():
    step = torch.zeros(())
    with ShapeCache():
        for _ in range(3):
            step.add_(torch.ones(()))
        assert (step.item(), step.to(META).item()) == (3.0, 1.0)
