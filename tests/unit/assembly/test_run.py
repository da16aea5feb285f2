"""What a run says at its start."""

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from torch import nn

from cascade_train.assembly.components import build_component
from cascade_train.assembly.run import doubts
from cascade_train.config.launch import compose_root, replaced
from cascade_train.engine.optimizer import Estimating
from tests.unit.config.composing import checked

TINY = ("model=c_tiny", "task=lora")


@pytest.mark.parametrize(
    ("overrides", "max_steps", "text"),
    [
        ((), 3, ""),
        (("lr_scheduler.warmup_steps=3",), 3, ""),
        (
            ("lr_scheduler.warmup_steps=3", "lr_scheduler.from_zero=true"),
            3,
            "lr_scheduler.warmup_steps=3: the run",
        ),
        (("lr_scheduler.warmup_steps=4",), 3, "lr_scheduler.warmup_steps=4: the run ends before"),
        (("optimizer=prodigy",), 3, ""),
        (("optimizer=prodigy", "optimizer.lr=1e-4"), 3, "optimizer.lr=0.0001 is a factor on the step size"),
        (("tracker.project=mine",), 3, "tracker.project=mine has no effect with tracker=none"),
    ],
)
def test_settings_without_effect_are_reported(overrides: tuple[str, ...], max_steps: int, text: str) -> None:
    cfg = checked(*TINY, "data=shapes", *overrides)
    optimizer = build_component(cfg, "optimizer").build({"weight": nn.Parameter(torch.zeros(2, 2))}, 1)
    found = " ".join(doubts(cfg, max_steps, estimates=isinstance(optimizer, Estimating)))
    assert found.startswith(text)
    assert bool(found) is bool(text)


@pytest.mark.parametrize(("more", "count"), [([], 1), (["data=shapes"], 0), (["experiment=tiny_c"], 0)])
def test_a_run_without_chosen_data_says_what_it_trains_on(more: list[str], count: int) -> None:
    with replaced(HydraConfig.instance(), "cfg", HydraConfig.instance().cfg):
        found = doubts(compose_root([*TINY, *more]), 100, estimates=False)
    assert found == ["No data is chosen: training on data=shapes. Your own: data.path=…"] * count
