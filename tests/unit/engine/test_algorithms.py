"""Every optimizer of `conf/`: trained, stopped and continued to the bit, on the tiny cascade, and in bytes."""

import importlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cascade_train.assembly.components import build_component
from cascade_train.config.groups import group_options
from cascade_train.config.targets import import_target
from cascade_train.distributed import parallelize as seam
from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.algorithms.adafactor import Adafactor
from cascade_train.engine.algorithms.adamw_8bit import code_values, decode, encode
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.phase import averaged, evaluated
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked
from tests.unit.engine.algorithms import NEED_WHOLE, OPTIONS, Small, bound, restored, same, spec, train, weights
from tests.unit.tasks.task_contract import attached, component, make_batch, trainable

SHARDED = [option for option in OPTIONS if option not in NEED_WHOLE]


def test_every_optimizer_of_conf_is_tried():
    assert {*OPTIONS, "torch"} == set(group_options("optimizer"))


@pytest.mark.parametrize("start_step", [1, 3])
@pytest.mark.parametrize(
    ("option", "sharded"), [*((each, False) for each in OPTIONS), *((each, True) for each in SHARDED)]
)
def test_it_learns_and_resumes_to_the_bit(world, tmp_path, monkeypatch, option, sharded, start_step):
    if sharded:
        monkeypatch.setattr(seam, "is_whole", lambda *_: False)
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    phase = bound(option, mesh, start_step=start_step)
    losses = train(phase, range(start_step, 3))
    path, at_two = store.save(2, phase.state_dict(), {}), weights(phase)
    losses += train(phase, range(3, 8))
    assert losses[-1] < losses[0]
    resumed = restored(bound(option, mesh, start_step=start_step), store, path)
    assert same(at_two, weights(resumed))
    assert losses[-5:] == train(resumed, range(3, 8))
    assert same(weights(phase), weights(resumed))
    if start_step == 3:  # a phase that begins later does what it would do from the start
        fresh = bound(option, mesh)
        train(fresh, range(3, 8))
        assert same(weights(phase), weights(fresh))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_weight_that_no_gradient_reached_resumes_without_state(world, tmp_path, monkeypatch, option):
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    whole = Small.forward
    monkeypatch.setattr(Small, "forward", lambda self, inputs: self.last(self.wide(inputs).relu()))
    phase = bound(option, mesh)
    train(phase, range(1, 3))
    path = store.save(2, {"phases": {"main": phase.state_dict()}}, {})
    resumed = bound(option, mesh)
    state = {"phases": {"main": resumed.state_dict()}}
    store.load(path, state)
    resumed.load_state_dict(state["phases"]["main"])
    monkeypatch.setattr(Small, "forward", whole)  # it is used from now on
    assert train(phase, range(3, 6)) == train(resumed, range(3, 6))
    assert same(weights(phase), weights(resumed))


@pytest.mark.parametrize("moved", ["matrices to all", "all to matrices"])
@pytest.mark.parametrize("option", OPTIONS)
def test_it_continues_where_other_weights_decay(world, tmp_path, option, moved):
    """With groups divided otherwise: all that it has found out stays with its weights."""
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    before, after = (bound(option, mesh, decay=decay, weight_decay=0.0) for decay in moved.split(" to "))
    train(before, range(1, 4))
    path = store.save(3, {"phases": {"main": before.state_dict()}}, {})
    state = {"phases": {"main": after.state_dict()}}
    store.load(path, state)
    after.load_state_dict(state["phases"]["main"])
    assert len(before.optimizer.param_groups) != len(after.optimizer.param_groups)
    assert train(before, range(4, 7)) == train(after, range(4, 7))
    assert same(weights(before), weights(after))


def test_the_state_of_another_algorithm_is_refused_as_that(world, tmp_path):
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    path = store.save(1, {"phases": {"main": bound("adamw", mesh).state_dict()}}, {})
    with pytest.raises(ConfigError, match=r"checkpoint of another optimizer: phases\.main\.optimizer\..* keys differ"):
        store.load(path, {"phases": {"main": bound("lion", mesh).state_dict()}})
    with pytest.raises(ConfigError, match="checkpoint of another model: "):
        store.load(path, {"phases": {"main": bound("lion", mesh, row=False).state_dict()}})


@pytest.mark.slow
@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_it_trains_the_tiny_cascade(world, task):
    made = attached(component("task", task), "c_tiny")
    (phase,) = made.phases()
    prepared, parameters = made.prepare_batch(make_batch(0, 1)), trainable(phase)
    first = {name: p.detach().clone() for name, p in parameters.items()}
    for option in OPTIONS:
        with torch.no_grad():
            for name, value in first.items():
                parameters[name].copy_(value)
        optimizer = spec(option, **({} if option == "prodigy" else {"lr": 1e-3})).build(parameters, 2)
        losses = []
        for _ in range(3):
            loss = phase.loss(prepared).loss_B.mean()
            loss.backward()
            optimizer.step()
            for parameter in parameters.values():
                parameter.grad = None
            losses.append(loss.item())
        assert losses[-1] < losses[0], option


@pytest.mark.parametrize("option", OPTIONS)
def test_weights_decay_by_groups(world, option):
    """By what one step changes: biases, norms and scales do not know the decay."""
    mesh = build_mesh(world, (1, 1))
    plain, decayed = (bound(option, mesh, weight_decay=decay) for decay in (0.0, 0.5))
    for phase in (plain, decayed):
        train(phase, range(1, 2))
    equal = {name: torch.equal(p, decayed.parameters[name]) for name, p in plain.parameters.items()}
    moved = {"n.wide.weight", "n.kernel.weight", "n.last.weight", "n.row.weight"}
    assert {name for name, is_equal in equal.items() if not is_equal} == moved


@pytest.mark.parametrize("option", NEED_WHOLE)
def test_what_needs_whole_weights_is_refused_on_shards(option):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ConfigError, match=r"cannot train these weights: .*whole.*sharded over 2 ranks. Remedy"):
            bound(option, mesh)
    finally:
        dist.destroy_process_group()


def test_muon_trains_matrices_and_adamw_the_rest():
    named = {**dict(Small().named_parameters()), "token_rows": nn.Parameter(torch.ones(2, 8))}
    optimizer = spec("muon", decay="all", algorithm={"lr_ratio": 0.5}).build(named, 1)
    names = {id(p): name for name, p in named.items()}
    matrices, others = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert matrices == ["wide.weight", "last.weight", "row.weight"]
    assert {"kernel.weight", "token_rows", "response.gamma", "norm.weight", "last.bias"} <= set(others)
    before = named["token_rows"].detach().clone()
    named["token_rows"].grad = torch.ones(2, 8)
    optimizer.step()
    torch.testing.assert_close(named["token_rows"], before * (1 - 5e-4 * 0.01) - 5e-4)  # Adam's first step is its rate
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    with pytest.raises(ValueError, match=r"lr_ratio=0.0 must be positive"):
        spec("muon", algorithm={"lr_ratio": 0.0}).build(named, 1)


def test_codes_stand_for_the_nearest_values_and_no_second_moment_is_zero():
    for signed in (True, False):
        values = code_values(signed, torch.device("cpu"))
        assert len(values.unique()) == 256
        assert (values[0] > -1.0, values[-1]) == (True, 1.0)
        assert bool((values == 0.0).any()) == signed
        wanted = torch.rand(3, 4, 64) - (0.5 if signed else 0.0)
        codes, scales = encode(wanted, 64, signed=signed)
        assert (codes.shape, codes.dtype, scales.shape) == ((3, 4, 64), torch.uint8, (3, 4))
        found = decode(codes, scales, signed=signed)
        distance = (wanted.unsqueeze(3) - scales[:, :, None, None] * values).abs().amin(dim=3)
        torch.testing.assert_close((found - wanted).abs(), distance, rtol=0, atol=1e-7)
        assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
    codes, scales = encode(torch.zeros(1, 64), 64, signed=False)
    assert not decode(codes, scales, signed=False).any()


def test_8_bit_moments_train_as_adamw_does(world):
    mesh = build_mesh(world, (1, 1))
    exact, rounded = bound("adamw", mesh), bound("adamw_8bit", mesh)
    losses = [train(phase, range(1, 21)) for phase in (exact, rounded)]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_8_bit_codes_do_not_depend_on_how_rows_are_divided():
    whole = nn.Parameter(torch.randn(6, 128))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 2, 0])]
    states = []
    for parameters in ([whole], parts):
        optimizer = spec("adamw_8bit").build({f"{i}.weight": p for i, p in enumerate(parameters)}, 1)
        for step in range(3):
            gradient = torch.randn(6, 128, generator=torch.Generator().manual_seed(step))
            for parameter, each in zip(parameters, gradient.split([len(p) for p in parameters]), strict=True):
                parameter.grad = each.clone()
            optimizer.step()
        each = optimizer.state_dict()["state"].values()
        states.append({name: torch.cat([state[name] for state in each]) for name in next(iter(each))})
    assert torch.equal(whole, torch.cat(parts))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in states[0].items()} == {
        **dict.fromkeys(("exp_avg_codes", "exp_avg_sq_codes"), (torch.uint8, (6, 128))),
        **dict.fromkeys(("exp_avg_scales", "exp_avg_sq_scales"), (torch.float32, (6, 2))),
    }
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_second_moment_has_all_codes_for_positive_numbers():
    weight = nn.Parameter(torch.zeros(1, 256))
    weight.grad = torch.linspace(0.1, 1.0, 256).sqrt().view(1, 256)
    optimizer = spec("adamw_8bit", algorithm={"block_size": 256}).build({"weight": weight}, 1)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq_codes"].unique().numel() > 120  # half of it if one bit were for a sign


def test_kernels_norms_and_narrow_rows_have_moments_in_fp32():
    network = Small()
    optimizer = spec("adamw_8bit").build(dict(network.named_parameters()), 1)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with_codes = {id(parameters[number]) for number, each in optimizer.state_dict()["state"].items() if len(each) == 4}
    names = {name for name, p in network.named_parameters() if id(p) in with_codes}
    assert names == {"wide.weight", "last.weight", "row.weight"}
    with pytest.raises(ValueError, match=r"block_size=0 must be 1 or more"):
        spec("adamw_8bit", algorithm={"block_size": 0}).build({}, 1)
    with pytest.raises(ValueError, match=r"betas=\[0.9, 1.0\] must be two numbers in \[0, 1\)"):
        spec("adamw_8bit", algorithm={"betas": [0.9, 1.0]}).build({}, 1)


def test_the_weights_that_count_are_the_mean_of_those_that_step(world):
    """With a constant learning rate and r=0 (Defazio et al. 2024, eq. 5)."""
    phase = bound("schedule_free", build_mesh(world, (1, 1)), weight_decay=0.0)
    phase.lr_schedule.warmup_steps = 0
    steps = []
    for step in range(1, 5):
        train(phase, range(step, step + 1))
        steps.append([phase.optimizer.state[p]["z"].clone() for p in phase.parameters.values()])
    trained = weights(phase)
    for look in (averaged, evaluated):
        with look([phase]):
            for found, *seen in zip(weights(phase), *steps, strict=True):
                torch.testing.assert_close(found, torch.stack(seen).mean(dim=0), rtol=1e-4, atol=1e-6)
            counting = weights(phase)
        assert same(trained, weights(phase))
        assert not same(trained, counting)
    saved = phase.state_dict()
    assert same(counting, [saved["weights"][name] for name in phase.parameters])
    assert same(trained, [saved["optimizer"]["weights"][name] for name in phase.parameters])


def test_a_checkpoint_without_optimizer_state_has_the_weights_that_count(world, tmp_path):
    phase, store = bound("schedule_free", build_mesh(world, (1, 1))), CheckpointStore(tmp_path)
    train(phase, range(1, 4))
    with averaged([phase]):
        counting = weights(phase)
    path = store.save(3, {"phases": {"main": phase.state_dict()}}, {})
    looked_at = bound("schedule_free", build_mesh(world, (1, 1)))
    state = {"phases": {"main": looked_at.state_dict(optimizer=False)}}
    store.load(path, state, optimizer=False)
    looked_at.load_state_dict(state["phases"]["main"])
    with averaged([looked_at]):
        assert same(counting, weights(looked_at))


def test_a_step_reports_the_rate_that_an_algorithm_makes_of_its_own(world):
    plain, estimating = (bound(option, build_mesh(world, (1, 1))) for option in ("adamw", "prodigy"))
    for phase in (plain, estimating):
        train(phase, range(1, 20))
        phase.phase.loss(torch.ones(2, 64)).sum().backward()
    assert plain.update(20, 100, torch.tensor(0.0)) == {"lr": 1e-2}
    rates = estimating.update(20, 100, torch.tensor(0.0))
    assert rates == {"lr": 1.0, "d_lr": estimating.optimizer.param_groups[0]["d"]}
    assert rates["d_lr"] > 1e-6, "it has grown since its start"


FREE = ("model=c_tiny", "task=lora", "optimizer=schedule_free")


def test_what_is_free_of_a_schedule_takes_none_and_no_second_average():
    assert checked(*FREE, "lr_scheduler.warmup_steps=3").lr_scheduler.warmup_steps == 3
    with pytest.raises(ConfigError, match=r"lr_scheduler=cosine lowers a learning rate that ScheduleFreeAdamW needs"):
        checked(*FREE, "lr_scheduler=cosine")
    with pytest.raises(ConfigError, match=r"ema.decay=0.9 would average weights that do not count: ScheduleFreeAdamW"):
        checked(*FREE, "ema.decay=0.9")
    with pytest.raises(
        ConfigError, match=r"ema.post_hoc=\[0.1\] would average weights that do not count: ScheduleFree"
    ):
        checked(*FREE, "ema.post_hoc=[0.1]", "checkpoint.keep_last=null")
    codes = ("model=a_tiny", "task=reconstruction", "objective=vqgan", "optimizer=schedule_free")
    assert checked(*codes, "objective.revive_after_steps=null").objective.revive_after_steps is None
    with pytest.raises(
        ConfigError, match=r"revive_after_steps=100 would write codes that ScheduleFreeAdamW takes back"
    ):
        checked(*codes)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optimizer=lion +optimizer.algorithm.beta=[0.9,0.9]", r"algorithm.beta is unknown: .*Did you mean .*betas"),
        ("optimizer=came optimizer.algorithm.betas=[0.9,0.9,2.0]", r"optimizer.algorithm: .*beta"),
        ("optimizer=muon optimizer.algorithm.lr_ratio=0.0", r"optimizer.algorithm: lr_ratio=0.0 must be positive"),
    ],
)
def test_wrong_arguments_are_refused_before_the_run(option, message):
    with pytest.raises(ConfigError, match=message):
        build_component(checked("model=c_tiny", "task=lora", *option.split()), "optimizer")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    name = "cascade_train.engine.algorithms.collection"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(name)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"needs the library pytorch_optimizer, which is not .*\.\[optimizers\]"):
        import_target(f"{name}.Lion")


def test_adafactor_is_that_of_torch_whose_norms_go_over_the_host():
    """On weights and norms, of which some have no gradient in the first step; by the defaults of each."""
    options = {"lr": 2e-3, "weight_decay": 0.01}
    networks = [Small(), Small()]
    kinds = (Adafactor, torch.optim.Adafactor)
    optimizers = [kind(each.parameters(), **options) for kind, each in zip(kinds, networks, strict=True)]
    for step in range(300):
        for optimizer, network in zip(optimizers, networks, strict=True):
            generator = torch.Generator().manual_seed(step)
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if step == 0 and parameter.ndim == 1 else parameter.detach() + noise
            optimizer.step()
    for ours, theirs in zip(*(each.parameters() for each in networks), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
