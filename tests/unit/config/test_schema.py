import dataclasses
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.help import attribute_docs
from cascade_train.config.preflight import preflight
from cascade_train.config.schema import Attention, Compile, ParallelMode, Precision, Root
from cascade_train.config.schema_outputs import TrackerName
from cascade_train.errors import ConfigError
from cascade_train.options import limit
from tests.unit.config.composing import checked, composed

AT_LEAST = {
    0: "run.seed ema.start_step sample.seed sample.guidance_scale validate.reconstructions",
    1: "run.timeout_seconds train.max_steps train.max_epochs train.global_batch_size train.micro_batch_size "
    "ema.every_steps parallel.shard_size log.every_steps checkpoint.every_steps checkpoint.keep_last "
    "checkpoint.keep_every_steps checkpoint.keep_best checkpoint.every_epochs "
    "sample.every_steps sample.count sample.steps validate.samples validate.every_steps validate.every_epochs "
    "profile.steps",
    2: "profile.start_step",
}
ABOVE = {
    0: "run.max_hours train.max_grad_norm memory.budget_gb sample.shift",
}
"""The smallest value of each number, or the largest that it must be above."""
RANGES = {
    **{
        f"{key}={n - 1}": rf"{key}={n - 1}(\.0)? must be {n}(\.0)? or more"
        for n in AT_LEAST
        for key in AT_LEAST[n].split()
    },
    **{f"{key}={n}": rf"{key}={n}(\.0)? must be greater than {n}" for n in ABOVE for key in ABOVE[n].split()},
    "run.name=a/b": r"run.name='a/b' must be one folder name",
    "run.name=": r"run.name='' must be one folder name",
    "run.dir=": r"run.dir='' must name a folder",
    "train.micro_batch_size=2.5": r"train.micro_batch_size=2.5 must be a whole number, auto or null",
    "train.micro_batch_size=most": r"train.micro_batch_size=most must be a whole number, auto or null",
    "memory.budget_gb='inf'": r"memory.budget_gb='?inf'? must be a number, auto or null",
    "memory.budget_gb=24GB": r"memory.budget_gb=24GB must be a number, auto or null",
    "memory.budget_gb=true": r"memory.budget_gb=True must be a number, auto or null",
    "ema.decay=1": r"ema.decay=1.0 must lie between 0 and 1, e.g. 0.999; null switches it off",
    "ema.weights=a": r"ema.weights=a has no effect: .* with ema.decay=None there may be none",
    "ema.post_hoc=[0.1,0.3]": r"ema.post_hoc=0.3 must lie between 0 and 0.2887: it is the standard deviation of the",
    "ema.post_hoc=[0.1,0.1]": r"ema.post_hoc=\[0.1, 0.1\] must be lengths of which each is at least a tenth longer",
    "ema.post_hoc=[0.1,0.05,0.109]": r"ema.post_hoc=\[0.1, 0.05, 0.109\] must be lengths .*or null. The difference",
    "ema.post_hoc=[]": r"ema.post_hoc=\[\] must be lengths",
    "ema.post_hoc=[0.05,0.1] ema.every_steps=2": r"ema.every_steps=2 must be 1 with ema.post_hoc, .*Set it to 1",
    "checkpoint.keep_best=2": r"checkpoint.keep_best=2 and checkpoint.best_metric=None belong together",
    "checkpoint.best_metric=loss": r"checkpoint.keep_best=None and checkpoint.best_metric=loss belong together",
    "sample.prompts=[]": r"sample.prompts=\[\] names nothing",
    "sample.prompts={a:1}": "must be a list of texts, or @file",
    "validate.share=1": r"validate.share=1.0 must lie between 0 and 1, e.g. 0.01; null for none",
    "validate.lpips=vgg.pth": r"validate.lpips=vgg.pth measures validate.reconstructions",
    "validate.rfid=a.pth": r"validate.rfid=a.pth measures validate.reconstructions",
    "validate.every_steps=5": r"validate.every_steps=5 needs held-out samples",
    "validate.reconstructions=1 validate.rfid=a.pth": "validate.rfid=a.pth measures validate.reconstructions",
    "validate.share=0.1 validate.urls=[a.tar]": "validate.share and validate.urls exclude each other",
    "checkpoint.keep_last=null checkpoint.keep_best=1 checkpoint.best_metric=loss": "keep_best has no effect with",
    **{
        f"tracker.name={name}": f"tracker={name} needs tracker.project"
        for name in TrackerName
        if name not in ("none", "tensorboard", "dvclive")
    },
}


@pytest.fixture(scope="module")
def whole() -> DictConfig:
    return composed("model=c_tiny", "task=lora")


def test_what_the_files_of_a_group_have_in_common_is_the_types_default(whole: DictConfig) -> None:
    """A run is followed as it goes, under no account that nobody named, and no start is refused."""
    assert (whole.tracker.entity, whole.tracker.mode) == (None, "online")


@pytest.fixture
def tiny(whole: DictConfig) -> DictConfig:
    return whole.copy()


@pytest.mark.parametrize("line", RANGES)
def test_a_value_out_of_range_is_refused_by_name(line: str, tiny: DictConfig):
    for override in line.split():
        key, _, value = override.partition("=")
        OmegaConf.update(tiny, key, yaml.safe_load(value) if value else "")
    with pytest.raises(ConfigError, match=RANGES[line]):
        OmegaConf.to_object(tiny)


def test_checkpoints_may_all_stay(tiny: DictConfig):
    tiny.checkpoint.keep_last = None
    assert preflight(tiny, ranks=1).checkpoint.keep_last is None


def test_limits_let_null_and_the_limit_itself_pass():
    limit(SimpleNamespace(a=None, b=1), "node", "a", "b", least=1)
    limit(SimpleNamespace(a=None), "node", "a", above=0.0)
    with pytest.raises(ConfigError, match="node.key=0 must be greater than 0"):
        limit(SimpleNamespace(key=0), "node", "key", above=0.0)


def test_choices_compare_equal_to_their_names():
    cfg = checked("model=c_tiny", "task=lora", "train.precision=bf16", "compile=regional", "attention=math")
    assert (cfg.train.precision, cfg.compile, cfg.attention) == (Precision.bf16, Compile.regional, Attention.math)
    assert (cfg.train.precision, cfg.compile, cfg.attention) == ("bf16", "regional", "math")
    assert cfg.parallel.mode is ParallelMode.auto
    assert cfg.tracker.name is TrackerName.none


def test_every_typed_key_says_what_it_is():
    nodes = [node for node in get_type_hints(Root).values() if dataclasses.is_dataclass(node)]
    assert len(nodes) == 11
    for node in nodes:
        fields = {field.name for field in dataclasses.fields(node)}
        assert fields == attribute_docs(node).keys()
