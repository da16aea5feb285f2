"""What every task must do; a new task subclasses this and names its file and stage."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cascade_train.assembly.build import build_node
from cascade_train.batch import Batch
from cascade_train.config.groups import option_files
from cascade_train.models.initialize import Fill, fill_
from cascade_train.tasks.base import Phase, Task
from tests.unit.models.stage_contract import NoSync
from tests.unit.models.stages import build_stage

CONF = Path(__file__).parents[3] / "conf"
CPU = torch.device("cpu")


def component(group: str, option: str, **changes: Any) -> Any:
    """Construct the component of `conf/<group>/<option>.yaml` with changes merged over it.

    An option of another group in its defaults, such as `/filter@filter: canny`, is mounted where it says.
    """
    own: Any = option_files(group)[option]
    given = OmegaConf.load(CONF / group / f"{option}.yaml").get("defaults", [])
    for place, mounted in [pair for entry in given if not isinstance(entry, str) for pair in entry.items()]:
        if place.startswith("override "):
            continue
        other, _, key = place.lstrip("/").partition("@")
        own[key] = OmegaConf.load(CONF / other / f"{mounted}.yaml")
    config = OmegaConf.merge({"run": {"seed": 0}}, {"node": own}, {"node": changes})
    OmegaConf.resolve(config)
    return build_node(config.node)


@functools.cache
def drawn(name: str, shape: torch.Size) -> Tensor:
    """Return the values of a parameter, which nobody changes."""
    values = torch.empty(shape)
    fill_(values, Fill(kind="normal", scale=0.1), 0, name)
    return values


def attached(task: Task, model: str, objective: Any = None) -> Task:
    """Return the task on a freshly built stage whose every network weight is drawn from N(0, 0.1)."""
    stage = build_stage(model)
    with torch.no_grad():
        for name, parameter in stage.network.named_parameters():
            parameter.copy_(drawn(name, parameter.shape))
    task.attach(stage, component("objective", "gdf") if objective is None else objective, CPU)
    return task


def make_batch(*indices: int, side: int = 96, captions: tuple[str, ...] | None = None) -> Batch:
    """Return a batch whose images and captions are functions of the samples' indices."""
    draws = [torch.Generator().manual_seed(index) for index in indices]
    images = [torch.randint(0, 256, (3, side, side), generator=g, dtype=torch.uint8) for g in draws]
    return Batch(
        image_BCHW=torch.stack(images),
        captions=captions or tuple(f"a small red circle, number {index}" for index in indices),
        keys=tuple(f"sample {index}" for index in indices),
        epoch_B=torch.zeros(len(indices), dtype=torch.int64),
        index_B=torch.tensor(indices),
        seed=3,
    )


def batch_for(task: Task, *indices: int) -> Batch:
    """Return such a batch with what the data workers make of its pictures for the task."""
    batch, transform = make_batch(*indices, side=task.stage.image_size), task.sample_transform()
    if transform is None or batch.image_BCHW is None:
        return batch
    pairs = zip(batch.image_BCHW.numpy(), batch.generators("transform"), strict=True)
    made = [transform(image, generator) for image, generator in pairs]
    return replace(batch, tensors={name: torch.from_numpy(np.stack([each[name] for each in made])) for name in made[0]})


def trainable(phase: Phase) -> dict[str, torch.nn.Parameter]:
    """Return a phase's trainable parameters."""
    return {n: p for n, p in torch.nn.ModuleDict(phase.modules).named_parameters() if p.requires_grad}


def left(task: Any, name: str, folder: Path) -> Path:
    """Write one of a task's exports into a folder, and return its own."""
    export = task.exports()[name]
    assert 0.0 <= export.write(export.module.state_dict(), folder / name) < 1e-5
    return folder / name


class TaskContract:
    """Subclass with `option`, the file in conf/task, and `model`, a small file in conf/model that it fits.

    `changes` are arguments of the task that differ from the file's, `objective` the file in conf/objective that scores
    it, `lr` one at which a single step of plain gradient descent shows in fp32.
    """

    option: ClassVar[str]
    changes: ClassVar[dict[str, Any]] = {}
    model: ClassVar[str]
    objective: ClassVar[str] = "gdf"
    lr: ClassVar[float] = 1e-3

    @classmethod
    def make(cls) -> Any:
        objective = component("objective", cls.objective)
        return attached(component("task", cls.option, **cls.changes).for_objective(objective), cls.model, objective)

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls) -> Any:
        return cls.make()

    @pytest.fixture
    def prepared(self, task: Task) -> Any:
        return task.prepare_batch(batch_for(task, 0, 1, 2, 3))

    def losses(self, task: Task, batch: Batch) -> list[Tensor]:
        prepared = task.prepare_batch(batch)
        return [phase.loss(prepared).loss_B.detach() for phase in task.phases()]

    def test_construction_touches_no_stage(self) -> None:
        task = component("task", self.option, **self.changes)
        assert not hasattr(task, "stage")
        assert task.fits
        assert isinstance(task.trains_network, bool)

    def test_every_trainable_parameter_is_an_fp32_master_under_one_root(self, task: Any) -> None:
        phases = task.phases()
        assert len({phase.name for phase in phases}) == len(phases)
        found = [parameter for phase in phases for parameter in trainable(phase).values()]
        assert found
        assert all(parameter.dtype == torch.float32 for parameter in found)
        networks = [] if "network" in task.stage.left_out else [task.stage.network]
        everywhere = [*networks, *task.stage.frozen_modules().values()]
        expected = {id(p) for module in everywhere for p in module.parameters() if p.requires_grad}
        assert expected <= {id(parameter) for parameter in found}
        assert len({id(parameter) for parameter in found}) == len(found)

    def test_units_are_modules_of_their_root_each_once(self, task: Task) -> None:
        for phase in task.phases():
            assert phase.units.keys() == phase.modules.keys()
            for name, root in phase.modules.items():
                inside = [id(module) for unit in phase.units[name] for module in unit]
                assert len(set(inside)) == len(inside) > 0
                assert set(inside) <= {id(module) for module in root.modules()}

    def test_loss_and_report_are_per_sample_fp32(self, task: Task, prepared: Any) -> None:
        for phase in task.phases():
            output = phase.loss(prepared)
            assert "loss_raw" in output.report
            for value in (output.loss_B, *output.report.values()):
                assert value.shape[0] == 4
                assert value.ndim <= 2
                assert value.dtype == torch.float32
                assert value.isfinite().all()
            assert output.loss_B.shape == output.report["loss_raw"].shape == (4,)
            assert output.loss_B.requires_grad
            assert not any(value.requires_grad for value in (*output.report.values(), *output.totals.values()))

    def test_gradients_reach_what_trains_and_nothing_else(self, task: Any, prepared: Any) -> None:
        for phase in task.phases():
            phase.loss(prepared).loss_B.mean().backward()
            wanted = trainable(phase)
            assert all(parameter.grad is not None for parameter in wanted.values())
            assert any(parameter.grad.abs().sum() > 0 for parameter in wanted.values())
            reached = [p for module in phase.modules.values() for p in module.parameters() if p.grad is not None]
            assert len(reached) == len(wanted)
            for module in phase.modules.values():
                module.zero_grad()
        assert all(p.grad is None for module in task.stage.frozen_modules().values() for p in module.parameters())

    def test_splitting_and_reordering_a_batch_change_no_sample(self, task: Task) -> None:
        whole = self.losses(task, batch_for(task, 0, 1, 2, 3))
        parts = [self.losses(task, batch_for(task, *ids)) for ids in ((3, 1), (0, 2))]
        for phase, losses in enumerate(whole):
            reordered = torch.cat([part[phase] for part in parts])
            torch.testing.assert_close(losses[torch.tensor([3, 1, 0, 2])], reordered, rtol=1e-4, atol=1e-6)
        assert whole[0].unique().numel() == 4

    def test_no_choice_about_a_sample_comes_from_the_global_generator(self, task: Task) -> None:
        before = torch.get_rng_state()
        self.losses(task, batch_for(task, 0, 1))
        assert torch.equal(torch.get_rng_state(), before)

    def test_losses_evaluation_and_prediction_never_wait_for_the_device(self, task: Task, prepared: Any) -> None:
        with NoSync():
            for phase in task.phases():
                phase.loss(prepared)
            task.measures(prepared, [0.0])

    def test_measures_are_fixed_numbers_of_each_sample(self, task: Task, prepared: Any) -> None:
        first, again = (task.measures(prepared, [-2.0, 2.0]) for _ in range(2))
        alone = task.measures(task.prepare_batch(batch_for(task, 2)), [-2.0, 2.0])
        for name, value in first.items():
            assert value.shape == (4,)
            assert value.dtype == torch.float32
            assert not value.requires_grad
            assert torch.equal(value, again[name])
            torch.testing.assert_close(alone[name], value[2:3], rtol=1e-3, atol=1e-6)

    def test_validation_measures_the_loss_of_training_and_moves_no_state(self, task: Task, prepared: Any) -> None:
        before = {name: value.clone() for name, value in task.state_dict().items()}
        loss = task.phases()[0].loss
        with torch.no_grad():
            held_out = loss(prepared).loss_B
        assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())
        torch.testing.assert_close(held_out, loss(prepared).loss_B.detach(), rtol=1e-5, atol=1e-7)

    def test_evaluation_is_a_fixed_number_per_sample_and_noise_level(self, task: Task, prepared: Any) -> None:
        low, again, high = (task.evaluate(prepared, level) for level in (-2.0, -2.0, 2.0))
        assert low.shape == (4,)
        assert low.dtype == torch.float32
        assert not low.requires_grad
        assert torch.equal(low, again)
        assert not torch.allclose(low, high)
        alone = task.evaluate(task.prepare_batch(batch_for(task, 2)), -2.0)
        torch.testing.assert_close(alone, low[2:3], rtol=1e-4, atol=1e-6)

    def test_a_caption_steers_the_prediction(self, task: Any) -> None:
        shape = task.stage.latent_shape(task.stage.image_size, task.stage.image_size)
        image = torch.zeros(2, 3, task.stage.image_size, task.stage.image_size)
        predict = task.predictor(["a large blue square", ""], image)
        cond, uncond = predict(torch.ones(2, *shape), torch.tensor([0.5, 0.5]))
        assert cond.shape == uncond.shape == (2, *shape)
        assert cond.dtype == uncond.dtype == torch.float32
        assert not cond.requires_grad
        assert not torch.allclose(cond[0], uncond[0], rtol=1e-3)
        same = torch.isclose(cond[1], uncond[1], rtol=1e-4, atol=1e-5).all()
        assert same != task.stage.needs_image, "without a caption only an image is left to tell the two apart"

    def test_state_survives_a_step_and_a_round_trip(self, task: Task, prepared: Any) -> None:
        output = task.phases()[0].loss(prepared)
        shown = task.after_step({**output.report, **output.totals})
        assert all(value.shape == () for value in shown.values())
        state = {name: value.clone() for name, value in task.state_dict().items()}
        task.load_state_dict(state)
        assert task.state_dict().keys() == state.keys()
        assert all(torch.equal(task.state_dict()[name], value) for name, value in state.items())

    def test_what_a_run_leaves_behind_is_written_and_read_back(self, task: Task, tmp_path: Path) -> None:
        assert task.exports()
        assert all(any(left(task, name, tmp_path).iterdir()) for name in task.exports())

    def test_a_step_lowers_the_loss_and_changes_only_what_trains(self) -> None:
        task = self.make()
        prepared = task.prepare_batch(batch_for(task, 0, 1, 2, 3))
        for phase in task.phases():
            modules = {**phase.modules, **task.stage.frozen_modules()}
            tensors = {f"{m}.{n}": t for m, module in modules.items() for n, t in module.state_dict().items()}
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            optimizer = torch.optim.SGD(trainable(phase).values(), lr=self.lr)
            first = phase.loss(prepared).loss_B.mean()
            first.backward()
            optimizer.step()
            changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
            assert changed
            assert changed <= trainable(phase).keys()
            assert phase.loss(prepared).loss_B.mean() < first
