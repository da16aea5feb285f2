"""Adapter training: fp32 adapters on a frozen base, and files that put them onto the base again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.models.lora import adapted_layers
from cascade_train.models.lora_files import load_lora
from cascade_train.tasks.lora import LoRA
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import TaskContract, attached, component, make_batch


class TestLoRA(TaskContract):
    option = "lora"
    model = "c_tiny"


class TestLoRAOnEveryLayer(TestLoRA):
    @pytest.fixture(scope="class")
    @classmethod
    def task(cls) -> Any:
        return attached(component("task", "lora", module_filters=None, rank=2), cls.model)


def test_the_frozen_base_is_in_eval_mode_and_only_adapter_dropout_trains() -> None:
    task = attached(component("task", "lora", dropout=0.1), "c_tiny")
    training = {name for name, module in task.stage.network.named_modules() if module.training}
    assert training
    assert all(".lora_dropout" in name for name in training)


def test_a_bf16_base_trains_fp32_adapters_and_keeps_no_gradient() -> None:
    stage = build_stage("c_tiny", dtype=torch.bfloat16)
    torch.nn.init.normal_(stage.network.clf[1].weight, std=0.1)
    task = component("task", "lora")
    task.attach(stage, component("objective", "gdf"), torch.device("cpu"))
    output = task.loss(task.prepare_batch(make_batch(0, 1)))
    assert output.loss_B.dtype == torch.float32
    output.loss_B.mean().backward()
    for name, parameter in stage.network.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name)
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)


def test_adapters_left_behind_predict_the_same_on_a_fresh_base(tmp_path: Path) -> None:
    task = attached(component("task", "lora"), "c_tiny")
    for _, layer in adapted_layers(task.stage.network):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    export = task.exports()["lora"]
    export.write(export.module.state_dict(), tmp_path / "lora")
    other = attached(component("task", "finetune"), "c_tiny")
    load_lora(other.stage.network.eval(), str(tmp_path / "lora"))
    inputs = torch.randn(1, 16, 3, 3), torch.tensor([0.4]), task.stage.conditions(task.stage.tokenize(["a circle"]))
    assert torch.equal(other.stage.predict(*inputs), task.stage.predict(*inputs))


def test_a_task_takes_up_what_it_left_behind(tmp_path: Path) -> None:
    task = attached(component("task", "lora"), "c_tiny")
    for _, layer in adapted_layers(task.stage.network):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    export = task.exports()["lora"]
    export.write(export.module.state_dict(), tmp_path / "export" / "lora")

    other = attached(component("task", "lora", seed=9), "c_tiny")
    other.load_export(tmp_path / "export")
    state = task.stage.network.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.stage.network.state_dict().items())

    wider = attached(component("task", "lora", rank=8), "c_tiny")
    with pytest.raises(ConfigError, match="have rank 4 and alpha 4, the task asks for task.rank=8 task.alpha=4"):
        wider.load_export(tmp_path / "export")
    fewer = attached(component("task", "lora", module_filters=["to_q"]), "c_tiny")
    with pytest.raises(ConfigError, match="are not those of the adapted modules"):
        fewer.load_export(tmp_path / "export")
    with pytest.raises(ConfigError, match="from=.*nothing: no such file or folder; give a run"):
        task.load_export(tmp_path / "nothing")


def test_first_values_follow_the_seed() -> None:
    down = [
        next(iter(adapted_layers(attached(component("task", "lora", seed=seed), "c_tiny").stage.network)))[1]
        .lora_A["default"]
        .weight
        for seed in (0, 0, 1)
    ]
    assert torch.equal(down[0], down[1])
    assert not torch.equal(down[0], down[2])


def test_a_filter_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'.atn' selects no linear or ungrouped convolution layer"):
        attached(component("task", "lora", module_filters=[".atn"]), "c_tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank=0: an adapter needs at least one column"),
        ({"alpha": 0.0}, r"alpha=0.0: the adapters' scale is alpha / rank, give a number above 0"),
        ({"dropout": 1.0}, "dropout=1.0: is a probability on the adapters' input"),
        ({"cond_drop_prob": 1.5}, "cond_drop_prob=1.5: is a share of the samples"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    options: dict[str, Any] = {
        "rank": 4,
        "alpha": 4.0,
        "dropout": 0.0,
        "module_filters": None,
        "seed": 0,
        "cond_drop_prob": 0.05,
        "image_keep_prob": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        LoRA(**(options | change))
