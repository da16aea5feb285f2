"""Averages by power functions in a training: what they are, what checkpoints keep of them, what is built from those."""

import shutil

import numpy as np
import pytest
import torch

from cascade_train.distributed.parallelize import local
from cascade_train.distributed.process_group import process_group
from cascade_train.engine.average import PowerFunctionAverages
from cascade_train.engine.checkpoint.writing import Background
from cascade_train.engine.phase import averaged
from cascade_train.engine.power_function import exponent_of
from cascade_train.results.export import restore_average
from tests.unit.engine.test_loop import build_trainer, weights

LENGTHS = (0.05, 0.1)
OTHERS = (0.03, 0.07, 0.12, 0.2)


def build(world, directory, lengths=LENGTHS, device=None, **options):
    trainer = build_trainer(world, directory, **options)
    (phase,) = trainer.phases
    phase.post_hoc = PowerFunctionAverages(phase.parameters, lengths=lengths, device=device)
    return trainer


def flat(values):
    return torch.cat([local(value).flatten() for value in values.values()])


def average(trainer, length):
    return flat(trainer.phases[0].post_hoc.state_dict()[str(length)])


def restore(trainer, step, length, lengths=LENGTHS):
    restore_average(list(lengths), trainer.store, trainer.phases, trainer.task, step=step, length=length)
    return weights(trainer)


def test_averages_are_sums_of_all_weights_that_there_were(world, tmp_path):
    trainer = build(world, tmp_path, max_steps=30)
    feed, history = iter(trainer.feed), []
    for _ in range(30):
        trainer.train_step(next(feed))
        history.append(weights(trainer).double())
    for length in LENGTHS:
        times = np.arange(len(history) + 1) / len(history)
        shares = torch.from_numpy(np.diff(times ** (exponent_of(length) + 1)))
        expected = sum(share * each for share, each in zip(shares, history, strict=True))
        torch.testing.assert_close(average(trainer, length).double(), expected, rtol=1e-6, atol=1e-7)
    assert (average(trainer, 0.05) - average(trainer, 0.1)).abs().max() > 1e-3


def test_nothing_else_changes_where_averages_are_kept(world, tmp_path):
    with_them, without = build(world, tmp_path / "a"), build_trainer(world, tmp_path / "b")
    for trainer in (with_them, without):
        trainer.run()
    found, expected = with_them.phases[0].state_dict(), without.phases[0].state_dict()
    assert found.keys() - expected.keys() == {"post_hoc"}
    for key in ("weights", "ema"):
        assert torch.equal(flat(found[key]), flat(expected[key]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What a toy leaves after 400 steps, with a checkpoint each 25."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with process_group() as world:
        build(world, folder, max_steps=400, checkpoint=25, log=100).run()
    return folder


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """Averages of other lengths, as the same training keeps them."""
    with process_group() as world:
        trainer = build(world, tmp_path_factory.mktemp("direct"), lengths=OTHERS, max_steps=400, log=100)
        trainer.run()
        return {length: average(trainer, length) for length in OTHERS}


@pytest.fixture
def trained(world, directory):
    """A toy that is not trained, with those checkpoints."""
    return build(world, directory)


@pytest.mark.parametrize("length", OTHERS)
def test_an_average_that_was_not_kept_is_near_to_the_one_that_would_have_been(direct, trained, length):
    """By a thousandth of the weights, and a small part of how far the nearest of those kept lies from it."""
    expected = direct[length]
    error = (restore(trained, 400, length) - expected).norm()
    apart = min((average(trained, each) - expected).norm() for each in LENGTHS)
    assert error < 1e-3 * expected.norm()
    assert error < 0.05 * apart


def test_an_average_that_was_kept_is_restored_bit_for_bit(world, trained, tmp_path):
    ended = build(world, tmp_path, max_steps=225, log=100)
    ended.run()
    for length in LENGTHS:
        restored = restore(trained, 225, length)
        assert torch.equal(restored, average(ended, length))
    with averaged(trained.phases):
        assert torch.equal(weights(trained), restored), "what is exported is this one"


def test_a_damaged_checkpoint_is_left_out(trained, world, tmp_path):
    shutil.copytree(trained.store.directory, tmp_path / "checkpoints")
    file = next((tmp_path / "checkpoints" / "step_200").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    trainer = build(world, tmp_path, max_steps=400)
    assert torch.equal(restore(trainer, 400, 0.05), restore(trained, 400, 0.05))
    assert not torch.equal(restore(trainer, 400, 0.12), restore(trained, 400, 0.12))


def test_a_run_that_was_killed_between_checkpoints_builds_the_same(world, tmp_path):
    whole = build(world, tmp_path / "whole", max_steps=40, checkpoint=4)
    whole.run()
    killed = build(world, tmp_path / "parts", max_steps=23, checkpoint=4)
    killed.run()
    shutil.rmtree(killed.store.directory / "step_23")
    again = build(world, tmp_path / "parts", max_steps=40, checkpoint=4)
    again.restore(again.store.newest())
    assert again.step == 20
    again.run()
    assert torch.equal(restore(again, 40, 0.12), restore(whole, 40, 0.12))


def test_averages_on_the_host_are_those_beside_the_weights(world, tmp_path, monkeypatch):
    """A thread blends them; here from weights that pretend to lie elsewhere."""
    beside, host = build(world, tmp_path / "a"), build(world, tmp_path / "b", device=torch.device("cpu"))
    host.phases[0].post_hoc._beside = Background(name="average")
    for trainer in (beside, host):
        trainer.run()
    for length in LENGTHS:
        assert torch.equal(average(beside, length), average(host, length))
