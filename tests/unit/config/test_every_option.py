"""Every file of `conf/`, and every pair of model and task, composes and passes preflight."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.groups import conf_dir, group_options, groups, option_targets
from cascade_train.config.preflight import preflight
from cascade_train.config.schema import COMPONENTS
from cascade_train.config.targets import class_constant
from cascade_train.errors import ConfigError
from cascade_train.models.cascade.stage_c import StageC
from tests.unit.config.composing import composed

pytestmark = pytest.mark.usefixtures("every_extra_installed")

CHOSEN = {"model": "c_tiny", "task": "finetune"}
OFFICIAL = (
    "finetune_c_3b",
    "finetune_c_3b_lowres",
    "finetune_c_3b_v",
    "finetune_c_1b",
    "finetune_c_3b_lora",
    "finetune_b_3b",
    "finetune_b_700m",
)
CONTROLNETS = {
    "controlnet_c_3b_canny": [],
    "controlnet_c_3b_inpainting": ["task.filter.weights=saliency_model.pt"],
    "controlnet_c_3b_sr": [],
    "controlnet_c_3b_identity": ["task.filter.detector=det_10g.onnx", "task.filter.recogniser=w600k_r50.onnx"],
}
"""The original's ControlNets, and the files that their filters need."""

OF_A_TUTORIAL = ("emoji_a", "emoji_b", "emoji_c", "emoji_compressor")

COMPANIONS = {
    **{f"model={m}": {"task": "reconstruction"} for m in ("a", "a_tiny", "b_3b", "b_700m", "b_tiny")},
    **{f"model={m}": {"task": "reconstruction"} for m in ("vae_sd", "vae_sdxl", "vae_tiny")},
    "task=reconstruction": {"model": "b_tiny"},
    **{
        f"objective={name}": {"model": model, "task": "reconstruction"}
        for name, target in option_targets("objective").items()
        if not class_constant(target, "denoises")
        for model in ("a_tiny", "c_tiny", "vae_tiny")
        if class_constant(option_targets("model")[model], "abilities") & {*class_constant(target, "fits")}
    },
    "filter": {"task": "controlnet"},
    **{f"objective={name}": {"model": "sd_tiny"} for name in ("ddpm", "ddpm_debiased", "ddpm_min_snr", "ddpm_v")},
}
"""What else is chosen, in the place of `CHOSEN`, with an option or with any option of a group."""


class OfFlow(StageC):
    """A stage of one's own, for an objective that no stage of the package is trained by."""

    noise_unit = "flow_timestep"


NEEDED = {
    "objective=flow_matching": [
        f"model._target_={OfFlow.__module__}.OfFlow",
        "run.allowed_packages=[tests,cascade_train,torch]",
    ],
    "data=webdataset": ["data.urls=[a.tar]"],
    **{f"data={name}": ["data.path=a"] for name in ("cached", "class_folders", "csv", "folder", "parquet")},
    "data=classification": ["data.urls=[a.tar]"],
    "data=mixture": ["+data@data.sources.a=shapes"],
    "tracker=wandb": ["tracker.project=p"],
    "optimizer=torch": ["optimizer.algorithm._target_=torch.optim.SGD"],
    **{f"experiment={name}": ["data.urls=[a.tar]"] for name in (*OFFICIAL, *OF_A_TUTORIAL)},
    **{f"filter={name}": ["task.filter.weights=a.onnx"] for name in ("depth", "pose", "sketch")},
    "filter=inpaint_saliency": ["task.filter.weights=saliency_model.pt"],
    "filter=identity": ["task.filter.detector=a.onnx", "task.filter.recogniser=b.onnx"],
    "filter=network": ["task.filter.network._target_=torch.nn.Identity"],
    "filter=own": [
        "task.filter._target_=cascade_train.filters.canny.CannyFilter",
        *("+task.filter.resize=224", "+task.filter.low=100", "+task.filter.high=200"),
    ],
    **{f"experiment={name}": ["data.urls=[a.tar]", *files] for name, files in CONTROLNETS.items()},
    **{f"experiment={name}": ["data.path=a"] for name in ("sdxl_cached", "sdxl_edm", "sdxl_finetune", "sdxl_lora")},
    **{f"experiment={name}": ["data.sources.pictures.path=a"] for name in ("sd_everydream", "sd_everydream_first")},
    **{
        f"experiment={name}": ["data.urls=[a.tar]", "data.num_examples_to_see=9"]
        for name in ("sd_from_scratch", "sd_finetune")
    },
    "experiment=sd_imagenet": ["data.urls=[a.tar]"],
}
"""Options that leave something to the user, and the least that they need."""

MOUNTED = {
    "noise": "noise@objective.noise",
    "distance": "distance@objective.distance",
    "times": "times@objective.times",
    "filter": "filter@task.filter",
}
"""Groups whose options go into another node, and how they are chosen there."""

SCORED_ALONE = {("stage_c", "reconstruction"): ["objective=preview"]}
"""What scores a task on a stage where neither the model nor the root chooses it."""

OPTIONS = [(group, option) for group in groups() for option in group_options(group)]
PAIRS = [(model, task) for model in group_options("model") for task in group_options("task")]
FILES = sorted(
    path
    for path in conf_dir().rglob("*.yaml")
    if not path.name.startswith("_") and path.relative_to(conf_dir()).parts[0] != "hydra"
)


def overrides(group: str, option: str) -> list[str]:
    """Return the least that composes an option: what else is chosen, and what it leaves to the user."""
    choice = f"{group}={option}"
    companions = COMPANIONS.get(choice, COMPANIONS.get(group, {}))
    chosen = {**CHOSEN, **companions, group: option} if group != "experiment" else {group: option}
    return [*(f"{MOUNTED.get(key, key)}={value}" for key, value in chosen.items()), *NEEDED.get(choice, [])]


def test_every_file_is_tried():
    assert len(OPTIONS) == len(FILES) - 1
    assert len(OPEN_FILES) > 10
    for group in groups():
        assert group_options(group), group
    assert len(PAIRS) >= 6
    assert {*COMPONENTS, "parallel", "tracker", "experiment", "debug"} <= set(groups())


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_and_passes_preflight(group: str, option: str):
    ready = preflight(composed(*overrides(group, option)), ranks=1)
    assert ready.run.dir == f"runs/{ready.run.name}"


@pytest.mark.parametrize(("model", "task"), PAIRS)
def test_model_and_task_train_together_or_are_refused(model: str, task: str):
    cfg = composed(f"model={model}", f"task={task}")
    stage = class_constant(cfg.model._target_, "name")
    if class_constant(cfg.model._target_, "abilities") & {*class_constant(cfg.task._target_, "fits")}:
        cfg = composed(f"model={model}", f"task={task}", *SCORED_ALONE.get((stage, task), []))
        assert preflight(cfg, ranks=1).run.name == f"{task}-{model}"
    else:
        with pytest.raises(ConfigError, match="Tasks that fit"):
            preflight(cfg, ranks=1)


LEFT_OPEN = {path: re.findall(r"^ *([^#\n]*):\s*\?\?\?", path.read_text(), re.MULTILINE) for path in FILES}
"""Keys of each file that it leaves to its user."""
OPEN_FILES = [path for path, left in LEFT_OPEN.items() if left and path.parent != conf_dir()]


@pytest.mark.parametrize("path", OPEN_FILES, ids=lambda path: str(path.relative_to(conf_dir())))
def test_what_a_file_leaves_to_its_user_has_no_value(path: Path):
    """Hydra merges `???` over a value of another file as nothing: it would ask for nothing."""
    group, option = path.relative_to(conf_dir()).parts[0], path.stem
    without = [each for each in overrides(group, option) if each not in NEEDED.get(f"{group}={option}", [])]
    missing = {key.rpartition(".")[2] for key in OmegaConf.missing_keys(composed(*without))}
    assert missing >= set(LEFT_OPEN[path])
