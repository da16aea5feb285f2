"""What constructors refuse, preflight refuses, before anything is written."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.components import construct
from cascade_train.config.preflight import preflight
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked, composed

REFUSED = {
    "optimizer.lr=-1": r"^optimizer\.lr=-1 must be positive",
    "+optimizer.algorithm.lr=-1": r"^optimizer\.algorithm: Invalid learning rate: -1",
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


@pytest.mark.parametrize("line", REFUSED)
def test_values_out_of_range_are_refused_by_preflight(line: str):
    with pytest.raises(ConfigError, match=REFUSED[line]):
        checked("task=lora", "model=c_tiny", *line.split())


def test_a_value_that_follows_another_key_is_not_blamed():
    with pytest.raises(ConfigError, match=r"^model\.image_size=-1: must be"):
        checked("task=lora", "model=c_tiny", "model.image_size=-1")
    for value in ("big", "64.5", "null"):
        with pytest.raises(ConfigError, match=rf"^model\.image_size={value}"):
            checked("task=lora", "model=c_tiny", f"model.image_size={value}")
    cfg = composed("task=lora", "model=c_tiny", "optimizer.lr=-1")
    OmegaConf.update(cfg, "data.flip_prob", "${optimizer.lr}")
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=-1 must be positive"):
        preflight(cfg, ranks=1)


OWN = """
import torch

class Counted:
    made = 0
    def __init__(self, size=1):
        Counted.made += 1

class Big(torch.nn.Module):
    def __init__(self):
        raise AssertionError("constructed on trial")

class Picky(torch.optim.SGD):
    def __init__(self, params, scale=1):
        if scale < 0:
            raise ValueError(f"scale={scale} is negative")
        if not params:
            raise ValueError("nothing to train")
        super().__init__(params)

class Ranked:
    def __init__(self):
        self.rank = torch.distributed.get_rank()

class Absent(torch.optim.SGD):
    def __init__(self, params):
        raise RuntimeError("no such device")

def function():
    raise AssertionError("called on trial")
"""


def test_what_may_be_expensive_is_not_constructed_on_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    node = {"_target_": "own_parts.Counted", "size": [{"_target_": "own_parts.function"}]}
    construct(node, "task", trial=True)
    construct({"_target_": "own_parts.Counted", "size": {"_target_": "own_parts.Big"}}, "task", trial=True)
    construct({"_target_": "own_parts.Absent", "_partial_": True}, "optimizer.algorithm", trial=True)
    assert sys.modules["own_parts"].Counted.made == 0
    construct({"_target_": "own_parts.Ranked"}, "task", trial=True)  # there is no process group yet
    picky = {"_target_": "own_parts.Picky", "_partial_": True}
    construct(picky, "optimizer.algorithm", trial=True)
    with pytest.raises(ConfigError, match=r"^optimizer\.algorithm\.scale=-1 is negative"):
        construct({**picky, "scale": -1}, "optimizer.algorithm", trial=True)


def test_positional_arguments_and_lists_of_components_are_constructed():
    pair = construct({"_target_": "builtins.dict", "_args_": [[["a", {"_target_": "builtins.list"}]]], "b": 1})
    assert pair == {"a": [], "b": 1}
    kept = construct({"_target_": "builtins.dict", "_recursive_": False, "a": {"_target_": "builtins.list"}})
    assert kept == {"a": {"_target_": "builtins.list"}}
