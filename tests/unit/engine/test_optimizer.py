"""What decays, how the rate scales, and that an update can be withheld."""

import inspect
import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cascade_train.distributed import parallelize as seam
from cascade_train.distributed.parallelize import local, parallelize
from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.lr_schedule import ConstantSchedule
from cascade_train.engine.optimizer import REFUSED, OptimizerSpec, can_withhold, settings
from cascade_train.engine.phase import BoundPhase, Ema, trainable_parameters
from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Phase
from tests.unit.engine import algorithms
from tests.unit.engine.algorithms import restored


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


def test_bytes_of_state_are_found_by_a_step():
    cpu = torch.device("cpu")
    found = {each: spec(algorithm=each).bytes_per_parameter(cpu) for each in (torch.optim.AdamW, torch.optim.SGD)}
    assert found == {torch.optim.AdamW: pytest.approx(8.0, rel=1e-3), torch.optim.SGD: 0.0}
    adafactor = spec(algorithm=torch.optim.Adafactor).bytes_per_parameter(cpu)
    assert 0 < adafactor < 0.1


def test_a_device_holds_what_trains_with_the_state_that_its_optimizer_keeps(monkeypatch):
    network = nn.Linear(1000, 1000, bias=False)
    frozen = nn.Linear(1000, 1000, bias=False).bfloat16().requires_grad_(False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=20e6 / seam.FITS_SHARE)
    )

    def fits(*roots, dtype=torch.bfloat16, state=(8.0, 0.0), device="cuda"):
        return seam.fits_one_device(roots, torch.device(device), compute_dtype=dtype, state_bytes=state)

    assert fits(network, frozen)  # 4 + 4 + 8 + 2, and 2
    assert not fits(network, frozen, state=[8.1])
    assert fits(network, frozen, dtype=torch.float32, state=[10.0])
    assert fits(network, frozen, state=[99.0], device="cpu")


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


ALGORITHMS = [
    getattr(torch.optim, name)
    for name in sorted(vars(torch.optim))
    if inspect.isclass(getattr(torch.optim, name)) and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    if getattr(torch.optim, name) is not torch.optim.Optimizer
]
FUSED_SGD = partial(torch.optim.SGD, fused=True)
DENSE = [*(each for each in ALGORITHMS if each not in REFUSED), FUSED_SGD]
NEED_WHOLE = (torch.optim.Adafactor,)
"""Algorithms that cannot work on parts of weights."""

SHARDED = [each for each in DENSE if each not in NEED_WHOLE]


def test_every_optimizer_of_torch_is_known():
    assert len(ALGORITHMS) >= 15
    assert {each.__name__ for each in REFUSED} == {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("algorithm", REFUSED)
def test_an_algorithm_that_cannot_train_here_is_refused_with_the_reason(algorithm):
    with pytest.raises(ValueError, match=rf"optimizer.algorithm={algorithm.__name__} cannot train here: it .* Choose"):
        spec(algorithm=partial(algorithm))


def test_weight_decay_that_does_nothing_is_refused():
    with pytest.raises(ValueError, match="optimizer.weight_decay=0.1 has no effect: Rprop has no weight decay. Set"):
        spec(algorithm=torch.optim.Rprop)


def matrices(mesh):
    """Return a phase's module of matrices alone, which every algorithm takes; a plain module where there is no mesh."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    if mesh is None:
        return network
    parallelize(network, [], mesh=mesh, compute_dtype=torch.float32, reshard_after_forward=True, compile_units=False)
    return network


def bound(algorithm, mesh, start_step=1, *, network=None, **changes):
    network = matrices(mesh) if network is None else network
    phase = Phase(name="main", modules={"n": network}, units={"n": []}, loss=network, start_step=start_step)
    decay = 0.0 if algorithm is torch.optim.Rprop else 0.1
    optimizer = spec(algorithm=algorithm, weight_decay=decay, **changes).build(trainable_parameters(phase), 1)
    constant = ConstantSchedule(warmup_steps=0)
    return BoundPhase(phase, optimizer=optimizer, base_lr=1e-2, lr_schedule=constant, ema=None, max_grad_norm=1.0)


def train(phase, steps):
    for step in steps:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        phase.phase.loss(inputs).square().sum().backward()
        phase.clip()
        phase.update(step, 10, torch.tensor(0.0))
    return [local(p.detach()).clone() for p in phase.parameters.values()]


@pytest.mark.parametrize("start_step", [1, 3])
@pytest.mark.parametrize(
    ("algorithm", "sharded"), [*((each, False) for each in DENSE), *((each, True) for each in SHARDED)]
)
def test_every_dense_optimizer_of_torch_trains_and_resumes_bitwise(
    world, tmp_path, monkeypatch, algorithm, sharded, start_step
):
    if sharded:
        monkeypatch.setattr(seam, "is_whole", lambda *_: False)
    mesh = build_mesh(world, (1, 1))
    whole = bound(algorithm, mesh, start_step)
    before = [local(p.detach()).clone() for p in whole.parameters.values()]
    store = CheckpointStore(tmp_path)
    first = train(whole, range(start_step, 3))
    path = store.save(2, whole.state_dict(), {})
    last = train(whole, range(3, 6))
    assert all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, last, strict=True))
    resumed = restored(bound(algorithm, mesh, start_step), store, path)
    at_two = [local(p.detach()) for p in resumed.parameters.values()]
    assert all(torch.equal(a, b) for a, b in zip(first, at_two, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(last, train(resumed, range(3, 6)), strict=True))
    if start_step == 3:  # a phase that begins later does what it would do from the start
        fresh = bound(algorithm, mesh)
        assert all(torch.equal(a, b) for a, b in zip(last, train(fresh, range(3, 6)), strict=True))


class OfRows(torch.optim.SGD):
    """Needs the rows of a matrix whole, which shards leave them."""

    def step(self, closure=None):
        if any(local(p).shape[1:] != p.shape[1:] for group in self.param_groups for p in group["params"]):
            raise RuntimeError("a part of a row")
        return super().step(closure)


@pytest.mark.parametrize("algorithm", NEED_WHOLE)
def test_what_cannot_work_on_parts_of_weights_is_refused_before_the_first_batch(algorithm):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        network = matrices(init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
        with pytest.raises(ConfigError, match=r"optimizer.algorithm=\w+ cannot train .* sharded over 2 ranks. Remedy"):
            spec(algorithm=algorithm, weight_decay=0.0).build(dict(network.named_parameters()), 1)
        spec(algorithm=OfRows).build(dict(network.named_parameters()), 1)
    finally:
        dist.destroy_process_group()


class SeenOnDTensors(TorchDispatchMode):
    """Counts the operations that DTensor has to plan."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def test_sharded_weights_are_updated_saved_and_averaged_as_plain_tensors(world, monkeypatch):
    """DTensor's plans took 97 % of the first step of a network of 1,550 tensors, and most of the host's time later."""
    monkeypatch.setattr(seam, "is_whole", lambda *_: False)
    phase = bound(partial(torch.optim.AdamW, fused=True), build_mesh(world, (1, 1)))
    phase.ema = Ema(phase.parameters, decay=0.9, start_step=1, every_steps=1, device=None)
    assert all(isinstance(p, DTensor) for p in phase.parameters.values())
    for step in (1, 2):
        phase.phase.loss(torch.randn(5, 4)).square().sum().backward()
        with SeenOnDTensors() as seen:
            phase.clip()
            phase.update(step, 10, torch.tensor(0.0))
        assert seen.count == 0
    state = phase.state_dict()
    assert all(isinstance(each, DTensor) for each in (*state["weights"].values(), *state["ema"].values()))
    moments = state["optimizer"]["state"]["n.0.weight"]
    assert {key: isinstance(value, DTensor) for key, value in moments.items()} == {
        **{"step": False, "exp_avg": True, "exp_avg_sq": True}
    }


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize(
    ("dtype", "in_update"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)]
)
def test_gradients_are_clipped_as_torch_clips_them(world, dtype, in_update, max_norm, monkeypatch):
    """In float64 too, where a fused optimizer takes neither a flag nor a scale of another dtype than fp32.

    `in_update`: scaled by the fused optimizer, as on a GPU; else to the bit.
    """
    monkeypatch.setattr("cascade_train.engine.phase.divided_in_update", lambda gradient: in_update)
    ours, plain = bound(partial(torch.optim.AdamW, fused=True), build_mesh(world, (1, 1))), matrices(None)
    ours.max_grad_norm = max_norm
    for network in (ours.phase.modules["n"], plain):
        network.to(dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, 4):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        for network in (ours.phase.loss, plain):
            network(inputs).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        assert torch.equal(ours.clip(), expected)
        optimizer.step()
        optimizer.zero_grad()
        ours.update(step, 10, torch.zeros((), dtype=torch.float32))
    tolerance = 1e-6 if in_update else 0.0
    for mine, theirs in zip(ours.phase.loss.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_moments_stay_with_their_weights_where_other_weights_decay(world):
    fused, networks = partial(torch.optim.AdamW, fused=True), [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))] * 2
    before, after = (
        bound(fused, None, network=deepcopy(network), decay=decay)
        for network, decay in zip(networks, ("matrices", "all"), strict=True)
    )
    before.phase.loss(torch.randn(5, 3)).square().sum().backward()
    before.clip()
    before.update(1, 10, torch.tensor(0.0))
    after.load_state_dict(before.state_dict())
    moments, found = (phase.state_dict()["optimizer"]["state"] for phase in (before, after))
    assert moments.keys() == found.keys() == after.parameters.keys()
    for name, each in moments.items():
        assert torch.equal(found[name]["exp_avg"], each["exp_avg"])
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.1]


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
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be 0 or more."),
        ({"decay": "biases"}, "optimizer.decay=biases must be matrices or all"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


class EstimatingSgd(torch.optim.SGD):
    """An algorithm that would estimate one learning rate for all."""

    def estimate(self) -> float:
        return 1.0


def test_a_root_has_a_learning_rate_of_its_own_under_the_same_schedule(world):
    modules = {name: nn.Linear(3, 2) for name in ("network", "text_encoder")}
    units = {name: [] for name in modules}
    phase = Phase(name="train", modules=modules, units=units, loss=None, lrs={"text_encoder": 0.1})
    named = trainable_parameters(phase)
    given = spec(lr=1.0, scale_lr=True, algorithm=torch.optim.SGD, weight_decay=0.0)
    optimizer = given.build(named, global_batch_size=4, lrs=phase.lrs)
    sizes = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
    assert sizes == [(4.0, 1), (4.0, 1), (0.4, 1), (0.4, 1)]
    schedule, rates = ConstantSchedule(warmup_steps=2), {"base_lr": 4.0, "lrs": {"text_encoder": 0.4}}
    bound = BoundPhase(phase, optimizer=optimizer, lr_schedule=schedule, ema=None, max_grad_norm=None, **rates)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    rates = bound.update(1, 10, torch.zeros(()))
    factor = rates["lr"] / 4.0
    assert 0 < factor < 1
    assert rates == {"lr": pytest.approx(4.0 * factor), "lr_text_encoder": pytest.approx(0.4 * factor)}
    for name, parameter in named.items():
        rate = 0.4 if name.startswith("text_encoder.") else 4.0
        torch.testing.assert_close(parameter.detach(), before[name] - rate * factor)


@pytest.mark.parametrize("option", algorithms.OPTIONS)
@pytest.mark.parametrize(("stop", "last"), [(2, 2), (0.25, 2), (0.01, 1)])
def test_a_root_stays_as_it_is_after_its_steps(option, stop, last, world):
    torch.manual_seed(0)
    modules = {name: nn.Linear(64, 64) for name in ("network", "text_encoder")}
    phase = Phase(
        name="train", modules=modules, units=dict.fromkeys(modules, []), loss=None, until={"text_encoder": stop}
    )
    named, given = trainable_parameters(phase), algorithms.spec(option)
    optimizer = given.build(named, global_batch_size=1)
    common = {"lr_schedule": ConstantSchedule(warmup_steps=1), "ema": None, "max_grad_norm": 1.0}
    bound = BoundPhase(phase, optimizer=optimizer, base_lr=given.base_lr(1), **common)
    inputs = torch.randn(8, 64)
    for step in range(1, 5):
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        modules["text_encoder"](modules["network"](inputs)).square().mean().backward()
        alone = torch.nn.utils.get_total_norm([p.grad for p in modules["network"].parameters()])
        norm = bound.clip(step, 8)
        rates = bound.update(step, 8, torch.zeros(()))
        stopped = step > last
        assert (norm == alone) == stopped
        assert rates.get("lr_text_encoder") == (0.0 if stopped else None)
        for name, parameter in named.items():
            assert torch.equal(parameter, before[name]) == (stopped and name.startswith("text_encoder.")), (step, name)


def test_weights_have_a_factor_on_their_learning_rate_by_the_first_expression_found_in_their_name(world):
    modules = {"network": nn.ModuleDict({"down": nn.Linear(3, 2), "up": nn.Linear(2, 3)}), "text": nn.Linear(3, 2)}
    phase = Phase(name="train", modules=modules, units=dict.fromkeys(modules, []), loss=None, lrs={"text": 0.1})
    named = trainable_parameters(phase)
    given = spec(
        lr=1.0, algorithm=torch.optim.SGD, weight_decay=0.0, lr_factors={r"\.up\..*bias$": 3.0, r"up|^text": 0.5}
    )
    given.check_lr_factors(list(named))
    optimizer = given.build(named, global_batch_size=1, lrs=phase.lrs)
    bound = BoundPhase(
        phase,
        optimizer=optimizer,
        base_lr=1.0,
        lrs={"text": 0.1},
        lr_factor=given.lr_factor,
        lr_schedule=ConstantSchedule(warmup_steps=2),
        ema=None,
        max_grad_norm=None,
    )
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    factor = bound.update(1, 10, torch.zeros(()))["lr"]
    wanted = {
        "network.down.weight": 1.0, "network.down.bias": 1.0, "network.up.weight": 0.5, "network.up.bias": 3.0,
        "text.weight": 0.05, "text.bias": 0.05,
    }  # fmt: skip
    assert named.keys() == wanted.keys()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), before[name] - wanted[name] * factor)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"a(": 1.0}, r"optimizer\.lr_factors: 'a\(' is no regular expression: missing \)"),
        ([["a"]], r"optimizer\.lr_factors=\[\['a'\]\] must be pairs, as in"),
        ({"a": 0.0}, r"optimizer\.lr_factors: 'a' has the factor 0\.0, which must be above 0"),
        ({"a": math.nan}, r"'a' has the factor nan"),
        ([["a", "0.5"]], r"'a' has the factor 0\.5, which must be above 0"),
        ([["a", 1.0], ["a", 3.0]], r"has an expression twice; leave one out"),
    ],
)
def test_factors_that_are_none_are_refused(factors, message):
    with pytest.raises(ValueError, match=message):
        spec(lr_factors=factors)


def test_an_expression_that_is_found_in_no_name_is_refused_with_some_that_there_are():
    with pytest.raises(
        ConfigError, match=r"'up_block' is found in no name of the 2 weights .* such as net\.down\.weight"
    ):
        spec(lr_factors={"down": 2.0, "up_block": 0.5}).check_lr_factors(["net.down.weight", "net.down.bias"])
    endless = spec(lr_factors={"(a|aa)+$": 2.0})
    with pytest.raises(ConfigError, match=r"optimizer\.lr_factors: '\(a\|aa\)\+\$' takes too long on aaa"):
        endless.lr_factor("a" * 60 + "b")


def test_an_algorithm_that_estimates_the_learning_rate_has_no_factors_on_it():
    with pytest.raises(ConfigError, match=r"EstimatingSgd estimates one .*: optimizer\.lr_factors has no effect"):
        spec(algorithm=EstimatingSgd, lr_factors={"weight": 2.0}).build(
            {"weight": nn.Parameter(torch.ones(2, 2))}, global_batch_size=1
        )


def test_an_algorithm_that_estimates_the_learning_rate_has_none_of_a_root():
    named = {"network.weight": nn.Parameter(torch.ones(2, 2)), "text_encoder.weight": nn.Parameter(torch.ones(2, 2))}
    with pytest.raises(
        ConfigError, match=r"EstimatingSgd estimates one learning rate .*: model\.text_encoder\.lr has no"
    ):
        spec(algorithm=EstimatingSgd).build(named, global_batch_size=1, lrs={"text_encoder": 0.1})
