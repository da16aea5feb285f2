"""The network under FSDP2 on a mesh of one, as a lone process runs it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cascade_train.models.cascade.networks.unet import CascadeUNet
from tests.unit.models.stages import filled_network, network_inputs


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def shard(network: CascadeUNet, mesh: DeviceMesh, dtype: torch.dtype) -> CascadeUNet:
    for unit in network.units():
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return fully_shard(network, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False))


def backward(network: CascadeUNet) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    control = {1: torch.randn(2, 32, 4, 5, generator=generator)}
    pred = network(**network_inputs(), control=control, return_dict=False)[0]
    pred.float().square().mean().backward()
    gradients = {name: p.grad for name, p in network.named_parameters()}
    return pred, {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_sharding_changes_nothing_in_fp32(mesh: DeviceMesh, recompute: bool) -> None:
    pred, expected = backward(filled_network())
    network = shard(filled_network(), mesh, torch.float32)
    network.gradient_checkpointing = recompute
    sharded_pred, got = backward(network)
    assert torch.equal(sharded_pred, pred)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_weights_gathered_in_bf16_keep_fp32_masters_and_gradients(mesh: DeviceMesh) -> None:
    _, expected = backward(filled_network())
    results = []
    for recompute in (False, True):
        network = shard(filled_network(), mesh, torch.bfloat16)
        network.gradient_checkpointing = recompute
        pred, got = backward(network)
        assert pred.dtype == torch.bfloat16
        assert {p.dtype for p in network.parameters()} == {g.dtype for g in got.values()} == {torch.float32}
        results.append(got)
    plain, recomputed = results
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    total = torch.cat([g.flatten() for g in expected.values()])
    error = torch.cat([plain[name].flatten() for name in expected]) - total
    assert error.norm() < 0.1 * total.norm()
