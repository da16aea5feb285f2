"""What is gathered by itself, and how FSDP2 is asked."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.model import build_modules
from cascade_train.assembly.planning.memory_trace import unloaded
from cascade_train.distributed import parallelize as seam
from cascade_train.distributed import sharded
from cascade_train.distributed.parallelize import (
    groups_of,
    offload_policy,
    parallelize,
    set_gradient_sync,
    settle_gradients,
)
from cascade_train.distributed.process_group import build_mesh
from cascade_train.distributed.sharded import gathered_alone
from cascade_train.errors import ConfigError
from cascade_train.models.formats.int8 import Int8Linear
from tests.unit.config.composing import checked

OPTIONS = {"compute_dtype": torch.float32, "reshard_after_forward": True, "compile_units": False}


@pytest.fixture
def sharding(world, monkeypatch):
    """Shard a network of two layers, the first of them a unit, on a mesh of one."""
    monkeypatch.setattr(seam, "is_whole", lambda *_: False)

    def shard(*, at_once=False, **options):
        monkeypatch.setattr(sharded, "GATHERED_AT_ONCE_BYTES", 1000 if at_once else 0)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        parallelize(network, [[network[0]]], mesh=build_mesh(world, (1, 1)), **(OPTIONS | options))
        return network

    return shard


@pytest.mark.parametrize(
    ("model", "task", "alone"),
    [("c_1b", "finetune", 32), ("b_700m", "reconstruction", 48), ("sd15", "finetune", 44), ("a", "reconstruction", 15)]
    + [("c_tiny", "finetune", 0), ("b_tiny", "reconstruction", 0), ("sdxl_tiny", "finetune", 0)],
)
def test_real_networks_are_gathered_unit_by_unit_and_tiny_ones_at_once(model, task, alone):
    cfg = unloaded(checked(f"model={model}", f"task={task}", "train.global_batch_size=1"))
    parts = build_parts(cfg)
    build_modules(cfg, parts, torch.device("meta"), network_dtype=torch.float32)
    phase = parts.task.phases()[0]
    assert len(gathered_alone(phase.modules["network"], phase.units["network"])) == alone


def test_codes_are_not_split_where_torch_cannot(world, monkeypatch):
    monkeypatch.setattr(seam, "is_whole", lambda *_: False)
    monkeypatch.setattr(sharded, "SPLITS_CODES", False)
    network = Int8Linear(nn.Linear(4, 8))
    with pytest.raises(ConfigError, match=r"int8 cannot be split .* Use torch 2\.12 or newer, parallel=ddp, or"):
        parallelize(network, [], mesh=build_mesh(world, (1, 1)), **OPTIONS)


def handed(monkeypatch) -> list:
    """Return a list of what FSDP2 is given from now on."""
    given = []
    monkeypatch.setattr(sharded, "fully_shard", lambda module, **options: given.append((module, options)))
    return given


def test_units_follow_the_key_and_what_is_left_stays_gathered_for_the_backward_pass(sharding, monkeypatch):
    given = handed(monkeypatch)
    for reshard_after_forward in (True, False):
        network = sharding(reshard_after_forward=reshard_after_forward)
        (unit, of_unit), (root, of_root) = given[-2:]
        assert (unit, root) == ([network[0]], network)
        assert (of_unit["reshard_after_forward"], of_root["reshard_after_forward"]) == (reshard_after_forward, False)


def test_the_offload_policy_reaches_every_unit_and_the_root(sharding, monkeypatch):
    given, offload = handed(monkeypatch), offload_policy(True, torch.device("cuda"))
    sharding(offload=offload)
    assert isinstance(offload, CPUOffloadPolicy)
    assert [options["offload_policy"] is offload for _, options in given] == [True, True]


def test_a_small_module_is_gathered_at_once_and_computes_the_same(sharding):
    found = []
    for at_once in (False, True):
        network = sharding(at_once=at_once, compute_dtype=torch.bfloat16)
        assert isinstance(network[0], sharded.FSDPModule) is not at_once
        loss = network(torch.ones(2, 4)).square().sum()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.full_tensor() for parameter in network.parameters())])
    assert all(torch.equal(alone, together) for alone, together in zip(*found, strict=True))


def test_weights_of_two_dtypes_are_not_gathered_together(world, monkeypatch):
    monkeypatch.setattr(seam, "is_whole", lambda *_: False)
    network = nn.Sequential(nn.Linear(4, 8, dtype=torch.bfloat16), nn.Linear(8, 1))
    options = {**OPTIONS, "compute_dtype": torch.bfloat16}
    parallelize(network, [[network[0]]], mesh=build_mesh(world, (1, 1)), **options)
    assert 4 * sum(p.numel() for p in network.parameters()) < sharded.GATHERED_AT_ONCE_BYTES
    network(torch.ones(2, 4)).square().sum().backward()
    assert [parameter.grad.dtype for parameter in network.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    frozen = nn.Sequential(nn.Linear(4, 8, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(8, 1))
    assert gathered_alone(frozen, [[frozen[0]]]) == []


def test_the_weights_that_a_step_ends_with_are_those_that_the_next_forward_computes_with(sharding):
    """Also where a forward without a backward pass has gathered them."""
    network = sharding(at_once=True)
    before = network(torch.ones(1, 4)).sum()
    before.backward()
    with torch.no_grad():
        network(torch.ones(1, 4))
    settle_gradients([network])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert network(torch.ones(1, 4)).sum() == 0


@pytest.mark.parametrize(
    ("split", "offloaded", "before_the_last"),
    [(False, False, (False, False)), (True, False, (True, False)), (True, True, (True, True))],
)
def test_what_is_sent_before_the_last_micro_batch(sharding, monkeypatch, split, offloaded, before_the_last):
    sent = []
    network = sharding()
    for module in (network[0], network):
        monkeypatch.setattr(module, "set_requires_gradient_sync", lambda scatter, **_: sent.append(scatter))
        monkeypatch.setattr(module, "set_requires_all_reduce", lambda add, **_: sent.append(add))
    mine = seam._SHARDED[network]
    assert (mine.is_split, mine.is_offloaded) == (False, False), "one rank on a CPU"
    mine.is_split, mine.is_offloaded = split, offloaded
    for last in (False, True):
        set_gradient_sync([network], last)
    assert tuple(sent) == (*before_the_last * 2, True, True, True, True)


def test_the_groups_of_a_sharded_module_are_those_of_its_mesh(sharding):
    assert len(groups_of([sharding()])) == 2
