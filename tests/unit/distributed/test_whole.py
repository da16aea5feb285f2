"""A module that each rank holds whole: copies compute, masters learn."""

import gc
import weakref

import pytest
import torch
from torch import nn

from cascade_train.distributed import whole
from cascade_train.distributed.parallelize import evaluating, groups_of, move, parallelize, reshard, settle_gradients
from cascade_train.distributed.process_group import build_mesh
from cascade_train.distributed.whole import Whole


class Network(nn.Module):
    """A unit between two layers of the root's own, the last one frozen; says in which dtype it computes."""

    def __init__(self):
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.last.requires_grad_(False)
        self.seen = []

    def forward(self, x, ratio):
        self.seen += [ratio.dtype, self.first.weight.dtype]
        return self.last(self.unit(self.first(x.to(self.first.weight.dtype)).float()))


def made(world, dtype=torch.bfloat16):
    torch.manual_seed(0)
    network = Network()
    options = {"compute_dtype": dtype, "reshard_after_forward": True, "compile_units": False}
    parallelize(network, [[network.unit]], mesh=build_mesh(world, (1, 1)), **options)
    return network


def test_the_forward_computes_in_bf16_and_leaves_what_it_is_given(world):
    network = made(world)
    out = network(torch.ones(2, 4), torch.ones(2))
    assert network.seen == [torch.float32, torch.bfloat16], "the ratio of timesteps stays fp32, weights do not"
    assert out.dtype == torch.bfloat16, "the input of a unit is cast"


def test_at_rest_the_module_holds_its_masters_under_their_names(world):
    network = made(world)
    before = dict(network.named_parameters())
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    assert all(p.dtype == torch.bfloat16 for p in network.parameters())
    settle_gradients([network])
    after = dict(network.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is master and master.dtype == torch.float32 for name, master in before.items())
    assert {name for name, p in after.items() if p.grad is not None} == {
        *("first.weight", "first.bias", "unit.weight", "unit.bias")
    }


def test_gradients_of_micro_batches_are_added_in_fp32(world):
    torch.manual_seed(1)
    batches = [torch.randn(2, 4) * 10**exponent for exponent in (0, -3, -3, -3)]
    network = made(world)
    singles = []
    for batch in batches:
        network(batch, torch.ones(2)).sum().backward()
        settle_gradients([network])
        singles.append(network.first.weight.grad)
        network.zero_grad(set_to_none=True)
    for batch in batches:
        network(batch, torch.ones(2)).sum().backward()
    settle_gradients([network])
    assert network.first.weight.grad.dtype == torch.float32
    assert torch.equal(network.first.weight.grad, singles[0] + singles[1] + singles[2] + singles[3])
    in_bf16 = sum(single.bfloat16() for single in singles).float()
    assert not torch.equal(network.first.weight.grad, in_bf16)


def test_the_next_forward_sees_what_was_written_into_the_masters(world):
    network = made(world)
    with evaluating([network]):
        before = network(torch.ones(1, 4), torch.ones(1))
        reshard([network])
        with torch.no_grad():
            network.first.weight.add_(1.0)
        after = network(torch.ones(1, 4), torch.ones(1))
    assert not torch.equal(before, after)
    assert network.first.weight.dtype == torch.float32


def test_a_weight_in_two_places_has_one_copy(world):
    network = Network()
    network.unit.weight = network.first.weight
    copies = Whole(network, [[network.unit]], compute_dtype=torch.bfloat16, group=None)
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    assert network.unit.weight is network.first.weight
    copies.settle()
    assert network.unit.weight is network.first.weight
    assert network.first.weight.grad.dtype == torch.float32


def test_one_rank_that_computes_as_it_stores_has_no_copies(world):
    network = made(world, torch.float32)
    weight = network.first.weight
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    assert network.first.weight is weight
    assert weight.grad is not None
    assert not network._forward_pre_hooks
    assert groups_of([network]) == []


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**9])
def test_gradients_are_the_mean_over_the_ranks_whatever_the_buckets(world, monkeypatch, bucket_bytes):
    monkeypatch.setattr(whole, "BUCKET_BYTES", bucket_bytes)
    sent = []
    real = torch.distributed.all_reduce
    monkeypatch.setattr(whole.dist, "all_reduce", lambda flat, **more: sent.append(len(flat)) or real(flat, **more))
    torch.manual_seed(0)
    network = Network()
    group = torch.distributed.group.WORLD
    mine = Whole(network, [], compute_dtype=torch.float32, group=group)
    mine.last = False
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    assert not sent, "nothing is sent before the last micro-batch"
    once = network.first.weight.grad.clone()
    mine.last = True
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    mine.settle()
    assert sum(sent) == 40
    assert len(sent) == {1: 4, 100: 2, 10**9: 1}[bucket_bytes]
    assert torch.equal(network.first.weight.grad, 2 * once)


def test_nothing_of_a_run_outlives_its_module(world):
    network = made(world)
    network(torch.ones(2, 4), torch.ones(2)).sum().backward()
    gone = weakref.ref(network), weakref.ref(network.first.weight)
    del network
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_what_is_on_its_device_or_has_no_memory_is_not_moved():
    network = Network()
    network.last.to("meta")
    before = [each.data_ptr() for each in network.first.parameters()]
    move(network.parameters(), torch.device("cpu"))
    assert [each.data_ptr() for each in network.first.parameters()] == before
    assert network.last.weight.is_meta
