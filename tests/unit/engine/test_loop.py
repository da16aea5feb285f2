"""The loop: accumulation, withholding, naming of failures, cadence, exact continuation."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from cascade_train.distributed.parallelize import local, parallelize
from cascade_train.distributed.process_group import build_mesh
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.loop import Cadence, Trainer
from cascade_train.engine.loss_charts import LossCurve
from cascade_train.engine.lr_schedule import ConstantSchedule
from cascade_train.engine.metrics import MetricsLog
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.engine.phase import BoundPhase, Ema, trainable_parameters
from cascade_train.engine.profiler import Profiler
from cascade_train.engine.progress import Progress
from cascade_train.engine.tracking import Tracker
from cascade_train.errors import RunError
from tests.unit.engine.algorithms import OPTIONS, spec
from tests.unit.engine.toy import ToyFeed, ToyTask


def build_trainer(
    world, directory: Path, *, task=None, micro=4, max_steps=6, lr=0.05, algorithm=None, excluded=(), **cadence
):
    directory.mkdir(exist_ok=True)  # as the claim of a run does; nothing makes it again in mid-run
    task = task or ToyTask()
    phase = task.phases()[0]
    options = {"compute_dtype": torch.float32, "reshard_after_forward": True, "compile_units": False}
    parallelize(task.network, phase.units["network"], mesh=build_mesh(world, (world.ranks, 1)), **options)
    parameters = trainable_parameters(phase)
    algorithm = algorithm or partial(torch.optim.AdamW, fused=True)
    spec = OptimizerSpec(lr=lr, scale_lr=False, weight_decay=0.01, algorithm=algorithm)
    bound = BoundPhase(
        phase,
        optimizer=spec.build(parameters, 4),
        base_lr=lr,
        lr_schedule=ConstantSchedule(warmup_steps=2),
        ema=Ema(parameters, decay=0.5, start_step=2, every_steps=1, device=None),
        max_grad_norm=1.0,
    )
    return Trainer(
        world=world,
        task=task,
        phases=[bound],
        feed=ToyFeed(global_batch_size=4, micro_batch_size=micro, excluded=excluded),
        seed=0,
        max_steps=max_steps,
        global_batch_size=4,
        cadence=Cadence(**{"log": 2, "validate": None, "sample": None, "checkpoint": None, **cadence}),
        metrics=MetricsLog(directory / "metrics.jsonl", is_main=True),
        store=CheckpointStore(directory / "checkpoints"),
        tracker=Tracker(),
        progress=Progress(max_steps=max_steps, is_main=False),
        profiler=Profiler(directory=directory, start_step=0, steps=None),
        validation=None,
        sampling=None,
    )


def weights(trainer):
    return torch.cat([local(p.detach()).flatten() for p in trainer.phases[0].parameters.values()])


def run_steps(trainer, steps):
    feed = iter(trainer.feed)
    return [trainer.train_step(next(feed)) for _ in range(steps)]


def test_a_fused_optimizer_trains_where_float64_is_the_default(world, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        trainer = build_trainer(world, tmp_path)
        before = weights(trainer)
        run_steps(trainer, 2)
        assert before.dtype == torch.float64
        assert not torch.equal(weights(trainer), before)
    finally:
        torch.set_default_dtype(torch.float32)


def test_accumulating_four_micro_batches_equals_one_batch_of_four(world, tmp_path):
    one = build_trainer(world, tmp_path / "one", micro=4)
    four = build_trainer(world, tmp_path / "four", micro=1)
    values = run_steps(one, 5), run_steps(four, 5)
    torch.testing.assert_close(weights(one), weights(four), rtol=1e-5, atol=1e-6)
    for a, b in zip(*values, strict=True):
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"], rtol=1e-5, atol=1e-6)


def test_micro_batches_are_prepared_one_ahead(world, tmp_path, monkeypatch):
    trainer, done = build_trainer(world, tmp_path, micro=1), []
    prepare, loss = trainer.task.prepare_batch, trainer.phases[0].phase.loss
    monkeypatch.setattr(trainer.task, "prepare_batch", lambda batch: (done.append("prepared"), prepare(batch))[1])
    looking = replace(trainer.phases[0].phase, loss=lambda batch: (done.append("trained"), loss(batch))[1])
    monkeypatch.setattr(trainer.phases[0], "phase", looking)
    run_steps(trainer, 1)
    assert done == ["prepared", *["prepared", "trained"] * 3, "trained"]


def test_loss_falls_and_every_step_is_measured(world, tmp_path):
    trainer = build_trainer(world, tmp_path, max_steps=60)
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert {"samples_seen", "loss", "loss_raw", "grad_norm", "lr", "images_per_second"} <= rows[0].keys()
    assert rows[0]["lr"] == pytest.approx(0.025)
    assert rows[5]["samples_seen"] == 24
    assert rows[0]["loss_raw"] == pytest.approx(2 * rows[0]["loss"])


def test_task_sees_the_whole_global_batch_in_its_order(world, tmp_path):
    trainer = build_trainer(world, tmp_path, micro=2)
    run_steps(trainer, 1)
    expected = ToyTask()
    prepared = expected.prepare_batch(next(iter(ToyFeed(global_batch_size=4, micro_batch_size=4)))[0])
    torch.testing.assert_close(trainer.task.reports[0]["loss"], expected.loss(prepared).loss_B.detach())


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_sample(world, tmp_path):
    trainer = build_trainer(world, tmp_path, task=ToyTask(poison=("toy:9",)), micro=2)
    run_steps(trainer, 2)
    before = weights(trainer)
    with pytest.raises(RunError, match=r"Step 3, phase main: the loss of 1 of 4 samples is not .* \(rank 0: toy:9\)"):
        run_steps(trainer, 1)
    assert torch.equal(weights(trainer), before)


def test_an_optimizer_without_a_flag_is_stopped_before_its_update_too(world, tmp_path):
    trainer = build_trainer(world, tmp_path, task=ToyTask(poison=("toy:1",)), algorithm=torch.optim.Adagrad)
    before = weights(trainer)
    with pytest.raises(RunError, match="Step 1, phase main"):
        run_steps(trainer, 1)
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_that_goes_on_without_a_bad_sample_ends_as_one_that_never_had_it(world, tmp_path, option, device):
    """On an accelerator the host reads losses late: steps go on, withheld or not, and no trace of them is left."""
    options = {"micro": 2, "algorithm": spec(option).algorithm, "max_steps": 7, "checkpoint": 2, "log": 3}
    spoiled = build_trainer(world, tmp_path / "a", task=ToyTask(("toy:17",)), **options)
    spoiled.world = replace(world, device=torch.device(device))
    with pytest.raises(RunError, match=r'Step 5, .*data.exclude=\["toy:17"\]'):
        spoiled.run()
    again = build_trainer(world, tmp_path / "a", task=ToyTask(("toy:17",)), excluded=("toy:17",), **options)
    again.restore(again.store.newest())
    assert again.step == 4
    again.run()
    without = build_trainer(world, tmp_path / "b", excluded=("toy:17",), **options)
    without.run()
    states = [flat_state(trainer) for trainer in (again, without)]
    assert torch.equal(*states)


def flat_state(trainer):
    """All that training changes."""
    state = trainer.phases[0].state_dict()
    moments = [value for moment in state["optimizer"]["state"].values() for value in moment.values()]
    groups = [value for group in state["optimizer"]["param_groups"] for value in group.values()]
    numbers = [value for value in groups if isinstance(value, float | torch.Tensor)]
    values = (*state["weights"].values(), *moments, *state["ema"].values(), *numbers)
    return torch.cat([local(torch.as_tensor(value)).flatten().double() for value in values])


def test_stopping_and_restoring_continues_bit_for_bit(world, tmp_path):
    whole = build_trainer(world, tmp_path / "whole", checkpoint=3)
    whole.run()
    first = build_trainer(world, tmp_path / "parts", max_steps=3, checkpoint=3)
    first.run()
    second = build_trainer(world, tmp_path / "parts", checkpoint=3)
    second.restore(second.store.newest())
    assert second.step == 3
    second.run()
    assert torch.equal(weights(second), weights(whole))
    for name, average in second.phases[0].ema.state_dict().items():
        assert torch.equal(local(average), local(whole.phases[0].ema.state_dict()[name]))


def test_a_continued_run_takes_the_settings_of_its_own_configuration(world, tmp_path):
    before, after = (partial(torch.optim.AdamW, betas=betas) for betas in ((0.5, 0.6), (0.7, 0.8)))
    first = build_trainer(world, tmp_path, max_steps=2, checkpoint=2, algorithm=before)
    first.run()
    second = build_trainer(world, tmp_path, algorithm=after)
    second.phases[0].optimizer.param_groups[0]["weight_decay"] = 0.5
    second.restore(second.store.newest())
    groups = second.phases[0].optimizer.param_groups
    assert [(group["betas"], group["weight_decay"]) for group in groups] == [((0.7, 0.8), 0.5), ((0.7, 0.8), 0.0)]
    moments = second.phases[0].optimizer.state_dict()["state"]
    assert [float(state["step"]) for state in moments.values()] == [2.0] * 4


def test_a_feed_that_ends_early_is_an_error(world, tmp_path):
    trainer = build_trainer(world, tmp_path)
    trainer.feed = EndingFeed(global_batch_size=4, micro_batch_size=4)
    with pytest.raises(RunError, match="The data ended at step 2 of 6"):
        trainer.run()


class EndingFeed(ToyFeed):
    """A feed of two steps."""

    def __iter__(self):
        for _, batches in zip(range(2), super().__iter__(), strict=False):
            yield batches


def test_what_a_task_notices_is_said_at_the_log_cadence(world, tmp_path, monkeypatch, caplog):
    trainer = build_trainer(world, tmp_path, max_steps=5)
    monkeypatch.setattr(trainer.task, "notices", lambda last=False: [f"seen by step {trainer.step}"])
    trainer.run()
    trainer.close()
    said = [record.message for record in caplog.records if "seen by" in record.message]
    assert said[:2] == [f"seen by step {step}" for step in (2, 4)]
    assert said[-1] == "In all, seen by step 5"


class CountingGrid:
    """A grid that only counts its drawings."""

    def __init__(self):
        self.steps = []

    def draw(self, step):
        self.steps.append(step)
        return []


def test_a_grid_is_drawn_before_the_first_step_and_not_after_a_resume(world, tmp_path):
    first = build_trainer(world, tmp_path, max_steps=4, sample=3, checkpoint=2)
    first.sampling = CountingGrid()
    first.run()
    assert first.sampling.steps == [0, 3, 4]
    second = build_trainer(world, tmp_path, max_steps=6, sample=3, checkpoint=2)
    second.sampling = CountingGrid()
    second.restore(second.store.newest())
    second.run()
    assert second.sampling.steps == [6]


def test_a_validation_reaches_the_progress_at_once(world, tmp_path, monkeypatch):
    trainer = build_trainer(world, tmp_path, max_steps=5, log=5, validate=2)
    trainer.validation = object()
    monkeypatch.setattr(trainer, "measure", lambda validation: {"validate/loss": 0.5})
    shown = []
    monkeypatch.setattr(trainer.progress, "update", lambda row: shown.append((trainer.step, row["step"])))
    trainer.run()
    assert shown == [(0, 0), (2, 1), (2, 2), (4, 3), (4, 4), (5, 5)]


def test_the_loss_curve_is_drawn_at_every_checkpoint(world, tmp_path):
    trainer = build_trainer(world, tmp_path, max_steps=5, checkpoint=2)
    trainer.loss_curve = LossCurve(tmp_path / "metrics.jsonl", is_main=True)
    drawn = []
    trainer.loss_curve.draw = lambda: drawn.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
    trainer.run()
    assert drawn == [2, 4, 5]
