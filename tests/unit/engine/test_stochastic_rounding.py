"""Weights in bf16: rounding is unbiased, and the same however weights are divided; runs learn and resume to the bit."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import nn

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.assembly.components import build_parts
from cascade_train.assembly.model import stored_dtype
from cascade_train.distributed import parallelize as seam
from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.algorithms.stochastic_rounding import StochasticRounding, random_bits, round_bf16
from cascade_train.engine.average import Ema
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.errors import ConfigError
from tests.integration.runs import cut_back, exported_weights, read_metrics
from tests.integration.runs import train as train_run
from tests.unit.config.composing import checked
from tests.unit.engine.algorithms import Small, bound, restored, same, spec, train, weights

CPU = torch.device("cpu")
BF16 = torch.bfloat16
ROUNDED = ("adamw", "adamw_8bit", "lion", "adafactor")


def test_values_between_two_of_bf16_are_rounded_up_in_proportion():
    count = 2**18
    for value in (1.0 + 2**-10, 1.0 + 3 * 2**-10, -2.0 - 2**-9, 3e-5):
        found = round_bf16(torch.full((count,), value), random_bits(7, 0, count, CPU)).double()
        low, high = found.min().item(), found.max().item()
        assert low < value < high
        deviation = (high - low) / 2 / count**0.5
        assert abs(found.mean().item() - value) < 4 * deviation
    over_steps = torch.stack(
        [round_bf16(torch.tensor([1.0 + 2**-9]), random_bits(key, 3, 1, CPU)) for key in range(4096)]
    )
    assert abs(over_steps.double().mean().item() - (1.0 + 2**-9)) < 4 * 2**-8 / 4096**0.5


def test_what_is_no_number_stays_none_whatever_its_bits():
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)  # the first is CUDA's
    assert round_bf16(patterns.view(torch.float32), random_bits(1, 0, 4, CPU)).isnan().all()
    largest = torch.finfo(torch.float32).max
    found = round_bf16(torch.tensor([largest, -largest, 1e-40]), torch.full((3,), 0xFFFF, dtype=torch.int32))
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert 0.0 < found[2].item() < 2e-40


def test_bits_of_steps_names_and_neighbours_are_not_correlated():
    count = 2**16
    keys = [int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") for text in ("0 1 a", "0 2 a")]
    first, *others = (
        random_bits(key, begin, count, CPU).double() for key, begin in ((keys[0], 0), (keys[1], 0), (keys[0], 1))
    )
    for other in (
        *others,
        random_bits(1, 0, count, CPU).double(),
        random_bits(keys[0], 2**32 + 5, count, CPU).double(),
    ):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1].item()) < 4 / count**0.5


def test_what_bf16_holds_stays_and_bits_are_uniform():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(BF16)
    kept = torch.cat([values, torch.tensor([0.0, torch.inf, -torch.inf], dtype=BF16)])
    assert torch.equal(round_bf16(kept.float(), random_bits(1, 0, len(kept), CPU)), kept)
    bits = random_bits(2**32 - 1, 2**31 - 50000, 100000, CPU)  # beyond int32 too
    counts = np.bincount(bits.numpy() >> 8, minlength=256)
    assert bits.min() >= 0
    assert ((counts - 100000 / 256) ** 2 / (100000 / 256)).sum() < 350  # chi-squared with 255 degrees, p < 1e-4


@pytest.mark.parametrize("option", ["adamw", "adamw_8bit"])
def test_bits_do_not_depend_on_how_rows_are_divided(monkeypatch, option: str):
    monkeypatch.setattr("cascade_train.engine.algorithms.stochastic_rounding.PIECE", 100)  # each part has several
    whole = nn.Parameter(torch.randn(6, 128, generator=torch.Generator().manual_seed(3)).to(BF16))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 2, 0])]
    states = []
    for parameters in ([whole], parts):
        algorithm = spec(option, lr=1e-4).algorithm([{"params": list(parameters), "weight_decay": 0.1}], lr=1e-4)
        firsts = np.cumsum([0, *(len(p) * 128 for p in parameters)])
        places = {p: ("weight", int(first)) for p, first in zip(parameters, firsts, strict=False)}
        optimizer = StochasticRounding(algorithm, places, seed=5)
        for step in range(3):
            gradient = torch.randn(6, 128, generator=torch.Generator().manual_seed(step)).to(BF16)
            for parameter, each in zip(parameters, gradient.split([len(p) for p in parameters]), strict=True):
                parameter.grad = each.clone()
            optimizer.step()
        states.append(optimizer.state_dict())
    assert torch.equal(whole, torch.cat(parts))
    assert states[0]["param_groups"][0]["rounding"] == states[1]["param_groups"][0]["rounding"] == 3
    moments = {v.dtype for v in states[0]["state"][0].values() if v.ndim}
    assert moments == ({torch.float32} if option == "adamw" else {torch.uint8, torch.float32})


@pytest.mark.parametrize("option", ROUNDED)
def test_it_learns_and_resumes_to_the_bit_whole_and_sharded(world, tmp_path, monkeypatch, option: str):
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    phase = bound(option, mesh, dtype=BF16)
    assert isinstance(phase.optimizer, StochasticRounding)
    losses = train(phase, range(1, 3))
    path = store.save(2, phase.state_dict(), {})
    losses += train(phase, range(3, 8))
    assert losses[-1] < losses[0]
    for sharded in (False, True) if option != "adafactor" else (False,):
        monkeypatch.setattr(seam, "is_whole", lambda *_, whole=not sharded: whole)
        resumed = restored(bound(option, mesh, dtype=BF16), store, path)
        assert losses[2:] == train(resumed, range(3, 8))
        assert same(weights(phase), weights(resumed))


@pytest.mark.parametrize("option", ["adamw_8bit", "lion"])
def test_layers_that_share_a_weight_are_rounded_once_and_resume_to_the_bit(world, tmp_path, monkeypatch, option: str):
    def shared(*, row: bool) -> Small:
        network = Small(row=row)
        network.again = nn.Linear(64, 128)
        network.again.weight = network.wide.weight
        forward = network.forward
        network.forward = lambda inputs: forward(inputs) + network.again(inputs)[:, :3]  # type: ignore[method-assign]
        return network

    monkeypatch.setattr("tests.unit.engine.algorithms.Small", shared)
    mesh, store = build_mesh(world, (1, 1)), CheckpointStore(tmp_path)
    phase, resumed = bound(option, mesh, dtype=BF16), bound(option, mesh, dtype=BF16)
    losses = train(phase, range(1, 3))
    path = store.save(2, phase.state_dict(), {})
    losses += train(phase, range(3, 6))
    assert losses[2:] == train(restored(resumed, store, path), range(3, 6))
    assert same(weights(phase), weights(resumed))
    network = resumed.phase.modules["n"]
    assert network.again.weight is network.wide.weight
    assert sum(len(group["params"]) for group in resumed.optimizer.param_groups) == len(resumed.parameters)


@pytest.mark.parametrize("option", ["prodigy", "muon", "schedule_free"])
def test_what_looks_at_several_weights_needs_masters(world, option: str):
    with pytest.raises(ConfigError, match=r"train\.master_weights=bf16: \w+ needs fp32 masters\. Set train\.master_we"):
        bound(option, build_mesh(world, (1, 1)), dtype=BF16)


def test_small_steps_are_not_lost():
    exact, weight = nn.Parameter(torch.ones(4096)), nn.Parameter(torch.ones(4096, dtype=BF16))
    nearest = torch.ones(4096, dtype=BF16)
    optimizer = StochasticRounding(torch.optim.SGD([weight], lr=1e-4), {weight: ("w", 0)}, seed=0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        exact.data -= 1e-4
        nearest -= 1e-4
    assert nearest.float().mean() == 1.0
    assert weight.float().mean().item() == pytest.approx(exact.mean().item(), abs=2e-4)


@pytest.mark.slow
def test_300_steps_follow_those_on_fp32_masters(world):
    mesh = build_mesh(world, (1, 1))
    exact = np.array(train(bound("adamw", mesh, lr=2e-4, dtype=BF16, stored=torch.float32), range(1, 301)))
    found = np.array(train(bound("adamw", mesh, lr=2e-4, dtype=BF16), range(1, 301)))
    assert exact[-20:].mean() < 0.5 * exact[:20].mean()
    for start in range(0, 300, 50):
        assert found[start : start + 50].mean() == pytest.approx(exact[start : start + 50].mean(), rel=0.02)


RUN = ("task=finetune", "train.precision=bf16", "train.master_weights=bf16", "train.global_batch_size=2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task=lora"], r"networks that train in bf16: no network trains here\. Set it to fp32"),
        (["train.precision=fp32"], r"networks that train in bf16: train\.precision=fp32 computes in fp32"),
    ],
)
def test_masters_are_for_networks_that_train_in_bf16(changes, message):
    cfg = checked("model=c_tiny", *RUN, *changes)
    with pytest.raises(ConfigError, match=message):
        stored_dtype(cfg, build_parts(cfg))


def test_a_look_at_the_average_leaves_it_in_fp32():
    weight = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0)).to(BF16))
    ema = Ema({"w": weight}, decay=0.999, start_step=0, every_steps=1, device=None)
    weight.data += 1.0
    ema.update(1)
    trained, average = weight.detach().clone(), ema.state_dict()["w"].clone()
    with ema.swapped([nn.ParameterList([weight])]):
        assert torch.equal(weight, average.to(BF16))
    assert torch.equal(weight, trained)
    assert torch.equal(ema.state_dict()["w"], average)
    assert not torch.equal(average, average.to(BF16).float())


def test_a_run_resumes_to_the_bit_and_holds_no_masters(tmp_path):
    wide = "model.network.block_out_channels=[64,64]"  # rows of which moments in 8 bits have a block
    given = (*SMALL_NETWORK, wide, *RUN, "optimizer=adamw_8bit", "ema.decay=0.9")
    run = train_run(tmp_path / "run", *given)
    copy = cut_back(run, tmp_path / "copy", 2)
    train_run(copy, *given)
    assert read_metrics(copy) == read_metrics(run)
    for name, value in exported_weights(run).items():
        assert torch.equal(value, exported_weights(copy)[name])
