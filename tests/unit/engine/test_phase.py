"""The average: its formula, its start, its cadence, its swap and its state."""

import pytest
import torch
from torch import nn

from cascade_train.distributed.parallelize import local, parallelize
from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.checkpoint.writing import Background
from cascade_train.engine.phase import Ema, gather_samples
from cascade_train.tasks.base import StepOutput
from tests.unit.engine.test_optimizer import bound


def build(world, **changes):
    network = nn.Linear(3, 2)
    mesh = build_mesh(world, (1, 1))
    parallelize(network, [], mesh=mesh, compute_dtype=torch.float32, reshard_after_forward=True, compile_units=False)
    options = {"decay": 0.9, "start_step": 0, "every_steps": 1, "device": None}
    return network, Ema(dict(network.named_parameters()), **{**options, **changes})


def add_one(network):
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)


def weight(network):
    return local(network.weight.detach()).clone()


def test_average_follows_its_formula(world):
    network, ema = build(world)
    expected = weight(network)
    for step in range(1, 6):
        add_one(network)
        ema.update(step)
        expected = 0.9 * expected + 0.1 * weight(network)
    torch.testing.assert_close(local(ema.state_dict()["weight"]), expected, rtol=1e-6, atol=1e-6)


def test_a_ramp_shortens_the_first_updates(world):
    network, ema = build(world, decay=0.3, ramp=True, start_step=2, every_steps=2)
    for step, decay in ((2, 1 / 10), (3, 1.0), (4, 2 / 11), (6, 3 / 12), (8, 0.3)):
        before = local(ema.state_dict()["weight"]).clone()
        add_one(network)
        ema.update(step)
        expected = decay * before + (1 - decay) * weight(network)
        torch.testing.assert_close(local(ema.state_dict()["weight"]), expected, rtol=1e-6, atol=1e-6)
    assert ema.updates == ema.updates_until(9, after=8) == build(world, start_step=2, every_steps=2)[1].updates_until(9)


def test_average_is_a_copy_before_its_start_and_moves_only_at_its_cadence(world):
    network, ema = build(world, start_step=4, every_steps=2)
    add_one(network)
    before = local(ema.state_dict()["weight"]).clone()
    ema.update(1)
    assert torch.equal(local(ema.state_dict()["weight"]), before)
    ema.update(2)
    assert torch.equal(local(ema.state_dict()["weight"]), weight(network))


def test_swap_shows_the_average_to_the_forward_and_gives_the_weights_back_bit_for_bit(world):
    network, ema = build(world)
    x = torch.randn(4, 3)
    averaged_before = network(x).detach()
    add_one(network)
    current, now = weight(network), network(x).detach()
    with ema.swapped([network]), torch.no_grad():
        torch.testing.assert_close(network(x), averaged_before)
    assert torch.equal(weight(network), current)
    with torch.no_grad():
        assert torch.equal(network(x), now)
    assert not torch.allclose(now, averaged_before)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_state_returns_exactly(world, device):
    network, ema = build(world, device=device)
    add_one(network)
    ema.update(1)
    state = {name: value.clone() for name, value in ema.state_dict().items()}
    add_one(network)
    ema.update(2)
    ema.load_state_dict(state)
    assert all(torch.equal(local(a), local(state[name])) for name, a in ema.state_dict().items())
    assert len(state) == 2


def test_an_average_that_is_blended_beside_the_loop_has_the_same_numbers(world):
    network, ema = build(world, start_step=2)
    beside = Ema(dict(network.named_parameters()), decay=0.9, start_step=2, every_steps=1, device=torch.device("cpu"))
    beside._beside = Background(name="average")  # as where weights lie on a device
    for step in range(1, 6):
        beside.release()
        add_one(network)
        ema.update(step)
        beside.update(step)
        add_one(network)  # what changes after an update does not reach it
    assert beside._blended is not None, "nothing was done beside the loop"
    expected = ema.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in beside.state_dict().items())


def test_average_starts_from_given_values_and_leaves_the_weights_alone(world):
    network, ema = build(world)
    before = weight(network)
    given = {"weight": torch.full((2, 3), 7.0), "bias": torch.full((2,), 5.0), "elsewhere": torch.zeros(1)}
    ema.start_from(given.items())
    assert torch.equal(local(ema.state_dict()["weight"]), given["weight"])
    assert torch.equal(weight(network), before)
    ema.update(1)
    torch.testing.assert_close(local(ema.state_dict()["weight"]), 0.9 * given["weight"] + 0.1 * before)
    with pytest.raises(AssertionError, match="no value to start from for weight"):
        ema.start_from([("bias", given["bias"])])


def test_samples_of_all_outputs_are_gathered(world):
    outputs = [
        StepOutput(loss_B=torch.rand(3), report={"logsnr": torch.rand(3), "parts": torch.rand(3, 2)}) for _ in range(2)
    ]
    gathered = gather_samples(outputs)
    assert torch.equal(gathered["loss"], torch.cat([each.loss_B for each in outputs]))
    for name in ("logsnr", "parts"):
        assert torch.equal(gathered[name], torch.cat([each.report[name] for each in outputs]))
    assert all(value.is_contiguous() for value in gathered.values())


class Counting(torch.optim.SGD):
    """An optimizer of a user's own, whose whole numbers fp32 would round."""

    def step(self, closure=None):
        super().step()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["seen"] = torch.full((2,), 2**24 + 1)


def test_state_of_an_optimizer_is_restored_in_its_own_dtype(world):
    before, after = (bound(Counting, None, network=nn.Sequential(nn.Linear(3, 3))) for _ in range(2))
    before.phase.loss(torch.randn(5, 3)).square().sum().backward()
    before.clip()
    before.update(1, 10, torch.tensor(0.0))
    after.load_state_dict(before.state_dict())
    found = after.state_dict()["optimizer"]["state"]
    assert [each["seen"].tolist() for each in found.values()] == [[2**24 + 1] * 2] * 2
