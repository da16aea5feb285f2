"""What constructors refuse is refused before data and weights are loaded, by the whole key."""

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from cascade_train.assembly.build import build_node
from cascade_train.assembly.components import build_component, build_parts
from cascade_train.config.preflight import preflight
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked, composed

REFUSED = {
    "optimizer.lr=-1": r"^optimizer\.lr=-1 must be positive",
    "+optimizer.algorithm.lr=-1": r"^optimizer\.algorithm\.lr has no effect\. Set optimizer\.lr",
    "optimizer.algorithm.betas=[2.0,0.9]": r"^optimizer\.algorithm: Invalid beta parameter at index 0",
    "lr_scheduler=cosine lr_scheduler.min_factor=2": r"^lr_scheduler\.min_factor=2",
    "task.cond_drop_prob=2": r"^task\.cond_drop_prob=2 must lie in",
    "data.flip_prob=3": r"^data\.flip_prob=3 must lie in \[0.0, 1.0\]",
    "data.buckets.multiple_px=0": r"^data\.buckets\.multiple_px=0",
    "objective.schedule.s=7": r"^objective\.schedule\.s=7 must lie in",
    "objective.timestep_bias.portion=-1": r"^objective\.timestep_bias\.portion=-1 must",
    "objective.offset_noise=-1": r"^objective\.offset_noise=-1 must lie in",
    "task=reconstruction model=b_tiny task.cond_drop_prob=2": r"^task\.cond_drop_prob=2 must lie in",
    "task=reconstruction model=a_tiny objective=vqgan objective.codebook_weight=-1": r"^objective\.codebook_weight=-1",
    "data=parquet data.path=a.parquet data.width_column=w": r"^data\.width_column and data\.height_column belong",
    "data=regularised data.share=1.5": r"^data\.share=1.5 must lie between 0 and 1",
    "task=controlnet task.control_drop_prob=2": r"^task\.control_drop_prob=2 must lie in",
    "task=controlnet task.filter.low=300": r"^task\.filter\.low=300",
}


def build_all(cfg: DictConfig) -> None:
    build_parts(cfg)
    build_component(cfg, "data")


@pytest.mark.parametrize("line", REFUSED)
def test_values_out_of_range_are_refused_by_the_whole_key(line: str):
    with pytest.raises(ConfigError, match=REFUSED[line]):
        build_all(checked("task=lora", "model=c_tiny", *line.split()))


def test_a_value_that_follows_another_key_is_not_blamed():
    with pytest.raises(ConfigError, match=r"^model\.image_size=-1: must be"):
        build_all(checked("task=lora", "model=c_tiny", "model.image_size=-1"))
    for value in ("big", "64.5", "null"):
        with pytest.raises(ConfigError, match=rf"^model\.image_size={value}"):
            checked("task=lora", "model=c_tiny", f"model.image_size={value}")
    cfg = composed("task=lora", "model=c_tiny", "optimizer.lr=-1")
    OmegaConf.update(cfg, "data.flip_prob", "${optimizer.lr}")
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=-1 must be positive"):
        build_all(preflight(cfg, ranks=1))


def test_what_a_constructor_gets_is_plain_and_nested_components_come_first():
    inner = [["a", {"_target_": "builtins.list"}]]
    made = build_node({"_target_": "builtins.dict", "_args_": [inner], "b": {"c": [1]}})
    assert made == {"a": [], "b": {"c": [1]}}
    assert [type(made["b"]), type(made["b"]["c"])] == [dict, list]


def test_an_optimizer_that_only_a_rank_can_make_is_not_refused():
    node = {"_target_": f"{__name__}.NeedsRank", "_partial_": True}
    spec = OptimizerSpec(lr=1.0, scale_lr=False, weight_decay=0.0, algorithm=build_node(node))
    assert spec.algorithm_class is NeedsRank


class NeedsRank(torch.optim.SGD):
    def __init__(self, params: list, lr: float) -> None:
        super().__init__(params, lr=lr / torch.distributed.get_world_size())


class Defect:
    def __init__(self) -> None:
        raise IndexError("a defect")


def test_a_defect_of_a_constructor_has_no_circle_of_causes():
    with pytest.raises(IndexError, match="a defect") as raised:
        build_node({"_target_": f"{__name__}.Defect"}, "task")
    assert raised.value.__context__ is None
