"""Compiled units compute what plain ones do."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from cascade_train.distributed import parallelize as seam
from cascade_train.distributed.parallelize import materialise, offload_policy, parallelize, refuse_meta
from cascade_train.distributed.process_group import build_mesh
from cascade_train.errors import ConfigError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
def test_compiled_units_have_the_losses_and_gradients_of_plain_ones(world, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)  # else six programs try what the processor can
    found = []
    for compile_units in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 1))  # whose graphs need no compiler of C++
        mesh = build_mesh(world, (1, 1))
        options = {"compute_dtype": torch.float32, "reshard_after_forward": True, "compile_units": compile_units}
        parallelize(network, [[network[0]]], mesh=mesh, **options)
        loss = network(torch.ones(2, 4)).square().sum()
        loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        found.append([loss.detach(), *gradients])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert network[0]._compiled_call_impl is not None


def test_nothing_is_offloaded_unless_asked_and_never_from_a_cpu():
    assert type(offload_policy(False, torch.device("cpu"))) is OffloadPolicy
    with pytest.raises(ConfigError, match=r"parallel\.cpu_offload=true: this run computes on the host already"):
        offload_policy(True, torch.device("cpu"))


def test_what_is_sharded_without_memory_gets_this_ranks_rows(world):
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    network[1].weight = nn.Parameter(torch.ones(1, 8))
    network[0].bias.requires_grad_(False)
    options = {"compute_dtype": torch.float32, "reshard_after_forward": True, "compile_units": False}
    parallelize(network, [[network[0]]], mesh=build_mesh(world, (1, 1)), **options)
    with pytest.raises(AssertionError, match=r"3 tensors have no values: net\.0\.weight, net\.0\.bias, net\.1\.bias"):
        refuse_meta({"net": network})
    shares = materialise(network, world.device)
    assert {name: (tuple(rows.shape), first) for name, (rows, first) in shares.items()} == {
        "0.weight": ((8, 4), 0),
        "0.bias": ((8,), 0),
        "1.bias": ((1,), 0),
    }
    for rows, _ in shares.values():
        rows.fill_(0.5)
    refuse_meta({"net": network})
    loss = network(torch.ones(2, 4)).sum()
    loss.backward()
    assert float(loss.detach()) == 2 * (8 * 2.5 + 0.5)
    assert [p.grad is None for p in network.parameters()] == [False, True, False, False]
    assert materialise(network, world.device) == {}


def test_buffers_stay_where_fsdp_computes_when_offloaded_weights_get_their_memory(world, monkeypatch):
    network, moved = nn.BatchNorm1d(2), []
    monkeypatch.setattr(seam, "move", lambda tensors, device: moved.extend(tensors))
    materialise(network, world.device)
    assert {id(each) for each in moved} == {id(each) for each in network.parameters()}
    parallelize(
        network, [], mesh=build_mesh(world, (1, 1)), compute_dtype=torch.float32, reshard_after_forward=True,
        compile_units=False,
    )  # fmt: skip
    assert {id(each) for each in moved[2:]} == {id(each) for each in (*network.parameters(), *network.buffers())}
