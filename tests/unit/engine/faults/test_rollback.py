"""Going back after a bad step: to which checkpoint, without which samples, how often, and what is left of it."""

import dataclasses
import json
import logging

import pytest
import torch
from torch import Tensor

from cascade_train.distributed.parallelize import local
from cascade_train.engine.faults.bad_step import BadStepError, SpikeWatch
from cascade_train.engine.faults.rollback import Rollback, RolledBackList
from cascade_train.errors import RunError
from tests.unit.engine.algorithms import OPTIONS, spec
from tests.unit.engine.test_loop import build_trainer
from tests.unit.engine.toy import ToyTask


def rollback(directory, *, max_times=3, origin=None):
    """Return a rollback that notes to which steps metrics were cut."""
    cuts = []
    listed = RolledBackList(directory / "rolled_back.jsonl")
    return Rollback(listed=listed, max_times=max_times, origin=origin, cut_metrics=cuts.append), cuts


def lines(directory):
    return [json.loads(line) for line in (directory / "rolled_back.jsonl").read_text().splitlines()]


def state(trainer):
    """Return everything that training changes, flat."""
    found = trainer.phases[0].state_dict()
    moments = [value for each in found["optimizer"]["state"].values() for value in each.values()]
    groups = [
        v for group in found["optimizer"]["param_groups"] for v in group.values() if isinstance(v, float | Tensor)
    ]
    values = (*found["weights"].values(), *moments, *found["ema"].values(), *groups)
    return torch.cat([local(torch.as_tensor(value)).flatten().double() for value in values])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_with_a_bad_sample_ends_as_one_that_never_had_it(world, tmp_path, option, device):
    """On an accelerator the host reads losses late: steps go on, withheld or not, and no trace of them is left."""
    options = {"micro": 2, "algorithm": spec(option).algorithm, "max_steps": 7, "checkpoint": 2, "log": 3}
    spoiled = build_trainer(world, tmp_path / "a", task=ToyTask(("toy:17",)), **options)
    spoiled.world = dataclasses.replace(world, device=torch.device(device))
    back, cuts = rollback(tmp_path)
    back.run(spoiled)
    without = build_trainer(world, tmp_path / "b", **options)
    without.feed.exclude(["toy:17"])
    without.run()
    assert torch.equal(state(spoiled), state(without))
    assert (spoiled.step, spoiled.samples_seen, cuts) == (7, 28, [4])
    (line,) = lines(tmp_path)
    assert (line["step"], line["back_to"], line["keys"]) == (5, 4, ["toy:17"])
    assert "the loss of 1 of 4 samples is not finite" in line["reason"]


def test_a_run_that_is_killed_while_it_goes_back_ends_the_same(world, tmp_path, monkeypatch):
    options = {"max_steps": 7, "checkpoint": 2}
    killed = build_trainer(world, tmp_path / "a", task=ToyTask(("toy:17",)), **options)
    monkeypatch.setattr(killed.feed, "exclude", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rollback(tmp_path)[0].run(killed)
    again = build_trainer(world, tmp_path / "a", task=ToyTask(("toy:17",)), **options)
    back, cuts = rollback(tmp_path)
    again.feed.exclude(back.listed.keys)
    again.restore(again.store.newest())
    back.run(again)
    without = build_trainer(world, tmp_path / "b", **options)
    without.feed.exclude(["toy:17"])
    without.run()
    assert torch.equal(state(again), state(without))
    assert (cuts, len(lines(tmp_path))) == ([], 1)


def test_a_spike_is_rolled_back_and_its_sample_left_out(world, tmp_path, caplog):
    trainer = build_trainer(world, tmp_path, task=ToyTask(("toy:21",), factor=1e4), max_steps=8, checkpoint=2)
    trainer.spikes = SpikeWatch(factor=5.0, window_steps=3)
    back, _ = rollback(tmp_path)
    with caplog.at_level(logging.WARNING):
        back.run(trainer)
    assert [(line["step"], line["back_to"], line["keys"]) for line in lines(tmp_path)] == [(6, 4, ["toy:21"])]
    assert "Rolled back to step 4, without toy:21, since: Step 6, phase main: the loss" in caplog.text
    assert max(trainer.spikes.state_dict()["main"]) < 10


def test_the_window_of_losses_survives_a_resume(world, tmp_path):
    def begun(**options):
        trainer = build_trainer(world, tmp_path, task=ToyTask(("toy:13",), factor=1e4), **options)
        trainer.spikes = SpikeWatch(factor=5.0, window_steps=3)
        return trainer

    begun(max_steps=3, checkpoint=3).run()
    resumed = begun(checkpoint=3)
    resumed.restore(resumed.store.newest())
    with pytest.raises(BadStepError, match="Step 4, phase main: the loss"):
        resumed.run()


def test_a_norm_that_is_not_finite_leaves_the_whole_batch_out(world, tmp_path):
    trainer = build_trainer(world, tmp_path, checkpoint=1)
    phase, norms = trainer.phases[0], iter([0.0, 0.0, float("inf")])
    clip = phase.clip
    phase.clip = lambda *at: clip(*at) + next(norms, 0.0)
    rollback(tmp_path)[0].run(trainer)
    assert [line["keys"] for line in lines(tmp_path)] == [["toy:8", "toy:9", "toy:10", "toy:11"]]


def test_other_samples_that_fail_too_end_the_run_with_advice(world, tmp_path):
    never = ToyTask(tuple(f"toy:{i}" for i in (*range(12, 16), *range(1012, 1016))))
    trainer = build_trainer(world, tmp_path, task=never, checkpoint=3)
    back, _ = rollback(tmp_path, max_times=1)
    with pytest.raises(
        RunError, match=r"Step 4, .*Rolled back 1 times already.*lower optimizer.lr .*rollback.max_times"
    ):
        back.run(trainer)
    assert trainer.feed.excluded == {12, 13, 14, 15}


def test_without_a_checkpoint_the_run_ends_and_says_so(world, tmp_path):
    trainer = build_trainer(world, tmp_path, task=ToyTask(("toy:9",)))
    back, _ = rollback(tmp_path)
    with pytest.raises(
        RunError, match=r"Step 3, .*There is no checkpoint to go back to\. Remedy: a smaller checkpoint"
    ):
        back.run(trainer)
    assert not (tmp_path / "rolled_back.jsonl").exists()


def test_a_run_goes_back_to_where_it_started_from_before_its_first_checkpoint(world, tmp_path):
    origin = build_trainer(world, tmp_path / "origin", max_steps=2, checkpoint=2)
    origin.run()
    start = origin.store.newest()
    trainer = build_trainer(world, tmp_path / "own", task=ToyTask(("toy:9",)))
    trainer.restore(start)
    back, cuts = rollback(tmp_path, origin=start)
    back.run(trainer)
    assert (cuts, trainer.step) == ([2], 6)


def test_a_damaged_checkpoint_and_one_of_weights_that_overflowed_are_passed_over(world, tmp_path, caplog):
    trainer = build_trainer(world, tmp_path, task=ToyTask(("toy:18",)), checkpoint=1)
    save = trainer.save

    def saving():
        if trainer.step == 3:
            local(next(iter(trainer.phases[0].parameters.values())).detach())[0] = float("inf")
        save()
        if trainer.step == 2:
            (trainer.store.directory / "step_2" / ".metadata").unlink()

    trainer.save = saving
    back, cuts = rollback(tmp_path, max_times=1)
    with pytest.raises(RunError, match="Rolled back 1 times already"):  # its weights overflow again
        back.run(trainer)
    assert cuts == [1]
    assert "step_3 are not finite; an older checkpoint is taken" in caplog.text


def test_a_torn_line_is_dropped_and_a_damaged_one_refused(world, tmp_path):
    path = tmp_path / "rolled_back.jsonl"
    path.write_text('{"keys": ["a"]}\n{"keys": ["b"')
    listed = RolledBackList(path)
    assert (listed.times, listed.keys) == (1, {"a"})
    listed.add(BadStepError("bad", step=4, keys=["c"]), back_to=3)
    assert (listed.times, listed.keys) == (2, {"a", "c"})
    assert RolledBackList(path).keys == {"a", "c"}
    path.write_text('{"keys": 3}\n')
    with pytest.raises(RunError, match=r"rolled_back.jsonl is damaged .* Remedy: mend the line"):
        RolledBackList(path)
