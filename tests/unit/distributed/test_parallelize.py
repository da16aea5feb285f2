"""Compiled units compute what plain ones do."""

import pytest
import torch
from torch import nn

from cascade_train.distributed.parallelize import parallelize
from cascade_train.distributed.process_group import build_mesh


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
def test_compiled_units_have_the_losses_and_gradients_of_plain_ones(world):
    found = []
    for compile_units in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        mesh = build_mesh(world, (1, 1))
        options = {"compute_dtype": torch.float32, "reshard_after_forward": True, "compile_units": compile_units}
        parallelize(network, [[network[0]]], mesh=mesh, **options)
        loss = network(torch.ones(2, 4)).square().sum()
        loss.backward()
        gradients = [parameter.grad.full_tensor() for parameter in network.parameters()]
        found.append([loss.detach(), *gradients])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert network[0]._compiled_call_impl is not None
