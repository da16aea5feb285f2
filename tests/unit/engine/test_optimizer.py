"""What decays, how the rate scales, and that an update can be withheld."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.optimizer import OptimizerSpec, can_withhold, settings
from cascade_train.errors import ConfigError


def spec(**changes):
    options = {"lr": 1e-3, "scale_lr": False, "weight_decay": 0.1, "algorithm": partial(torch.optim.AdamW, fused=True)}
    return OptimizerSpec(**{**options, **changes})


def parameters():
    shapes = {
        "depthwise.weight": (8, 1, 3, 3),
        "channelwise.0.weight": (32, 8),
        "channelwise.0.bias": (32,),
        "channelwise.2.gamma": (1, 1, 1, 32),
        "channelwise.2.beta": (1, 1, 1, 32),
        "token_rows": (2, 8),
    }
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def test_only_matrices_and_kernels_decay():
    named = parameters()
    optimizer = spec().build(named, global_batch_size=4)
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert {id(p) for p in decayed["params"]} == {id(named["depthwise.weight"]), id(named["channelwise.0.weight"])}
    assert kept["weight_decay"] == 0.0
    assert len(kept["params"]) == 4


def test_all_parameters_decay_where_asked():
    optimizer = spec(decay="all").build(parameters(), global_batch_size=4)
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 6)]


def test_scale_lr_multiplies_by_the_global_batch():
    assert spec(scale_lr=True).base_lr(32) == pytest.approx(0.032)
    assert spec().base_lr(32) == pytest.approx(0.001)


def test_groups_without_parameters_are_left_out():
    optimizer = spec(algorithm=torch.optim.SGD).build({"a.bias": nn.Parameter(torch.ones(3))}, 1)
    assert len(optimizer.param_groups) == 1


def test_fused_adamw_leaves_weights_and_moments_when_withheld():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = spec().build({"a.weight": weight}, 1)
    assert can_withhold(optimizer)
    for withheld, moves in ((0.0, True), (1.0, False)):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, float("nan") if withheld else 1.0)
        optimizer.found_inf = torch.tensor(withheld)
        optimizer.step()
        assert torch.equal(weight, before) is not moves
    assert optimizer.state[weight]["exp_avg"].isfinite().all()


def test_unfused_optimizers_cannot_withhold():
    assert not can_withhold(torch.optim.Adagrad([nn.Parameter(torch.ones(1))]))


def test_an_algorithm_that_refuses_these_weights_is_a_mistake_of_the_configuration():
    with pytest.raises(ConfigError, match=r"optimizer.algorithm=Muon cannot train these weights: .*2D.*Remedy"):
        spec(algorithm=torch.optim.Muon).build(parameters(), 1)


@pytest.mark.parametrize("algorithm", [torch.optim.Adafactor, torch.optim.Rprop, partial(torch.optim.SGD, fused=True)])
def test_an_algorithm_that_cannot_work_on_shards_is_refused_before_the_first_batch(world, algorithm):
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=build_mesh(world, (1, 1)))
    with pytest.raises(ConfigError, match=r"optimizer.algorithm=\w+ cannot train these weights: .* sharded"):
        spec(algorithm=algorithm).build(dict(layer.named_parameters()), 1)


def test_settings_are_what_the_constructor_takes_not_what_an_optimizer_keeps():
    optimizer = spec(algorithm=torch.optim.SGD).build({"a.weight": nn.Parameter(torch.ones(2, 2))}, 1)
    optimizer.param_groups[0]["progress"] = 7
    (found,) = settings(optimizer)
    assert (found["lr"], found["weight_decay"], found["momentum"]) == (1e-3, 0.1, 0)
    assert not {"params", "progress"} & found.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr=0.0 must be positive"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be 0 or"),
        ({"decay": "biases"}, "optimizer.decay=biases must be matrices or all"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)
