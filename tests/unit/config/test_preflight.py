import importlib.util
import math
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from cascade_train.config.preflight import EXTRAS, precision, preflight, split_batch
from cascade_train.config.schema import ParallelMode, Precision
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked, composed


@pytest.fixture(scope="module")
def whole() -> DictConfig:
    return composed("model=c_tiny", "task=lora", "data=webdataset", "data.urls=[a.tar]")


@pytest.fixture
def tiny(whole: DictConfig) -> DictConfig:
    return whole.copy()


def test_result_is_resolved_and_the_argument_stays_as_it_was(tiny: DictConfig):
    before = OmegaConf.to_container(tiny)
    result = preflight(tiny, ranks=1)
    assert OmegaConf.to_container(tiny) == before
    assert result.data.image_size == result.model.image_size
    assert result.run.name == "lora-c_tiny"
    assert result.run.dir == "runs/lora-c_tiny"
    assert "${" not in OmegaConf.to_yaml(result)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "found"),
    [(8, None, 1, 8), (8, None, 4, 2), (32, None, 4, 8), (8, 1, 8, 1), (8, 2, 2, 2)],
)
def test_without_a_micro_batch_size_there_is_no_accumulation(batch: int, micro: int | None, ranks: int, found: int):
    assert split_batch(batch, micro, ranks) == found


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "message"),
    [
        (8, None, 3, r"=8 cannot.*3 ranks: 6 or 9;.*fit 8: 1, 2, 4, 8\."),
        (2, None, 3, r"=2 cannot.*3 ranks: 3;"),
        (12, 5, 1, r"micro_batch_size=5 and 1 rank\. .*fit: 1, 2, 3, 4, 6, 12; global.*fit: 10 or 15\."),
        (8, 3, 2, r"micro_batch_size=3 and 2 ranks.*fit: 1, 2, 4; global.*fit: 6 or 12\."),
        (8, 16, 1, r"micro_batch_size=16 and 1 rank\. .*fit: 1, 2, 4, 8; global.*fit: 16\."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_fit(
    batch: int, micro: int | None, ranks: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        split_batch(batch, micro, ranks)


def test_ranks_come_from_the_environment(tiny: DictConfig, monkeypatch: pytest.MonkeyPatch):
    tiny.train.global_batch_size = 8
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 ranks: 6 or 9"):
        preflight(tiny)


@pytest.mark.parametrize(
    ("mode", "shard_size", "fitting", "refused", "message"),
    [
        (ParallelMode.single, None, 1, 2, "parallel=single runs on one rank, but 2 were started"),
        (ParallelMode.hsdp, 2, 4, 1, "parallel.shard_size=2 does not divide the 1 ranks. Choose a divisor, or null"),
        (ParallelMode.auto, 2, None, 4, "parallel.shard_size=2 is for parallel=hsdp, not auto"),
    ],
)
def test_the_ranks_must_form_the_mesh(
    tiny: DictConfig, mode: ParallelMode, shard_size: int | None, fitting: int | None, refused: int, message: str
):
    tiny.parallel.mode, tiny.parallel.shard_size = mode, shard_size
    if fitting is not None:
        preflight(tiny, ranks=fitting)
    with pytest.raises(ConfigError, match=message):
        preflight(tiny, ranks=refused)


REFUSED = [
    (
        {"data.urls": "???", "model.text_encoder.max_tokens": "???"},
        r"data.urls is not set.*Also missing: model.text_encoder.max_tokens\.",
    ),
    ({"train.max_stepz": 3}, r"train.max_stepz is unknown. Did you mean train.max_steps\?"),
    ({"foo": 3}, "foo is unknown. Known here: model, task"),
    ({"validate.logsnr": [0.0, math.nan]}, r"validate.logsnr\[1\]=nan must be a finite number"),
    ({"validate.logsnr": [-math.inf]}, r"validate.logsnr\[0\]=-inf must be a finite number"),
    ({"optimizer.lr": math.inf}, "optimizer.lr=inf must be a finite number"),
    ({"data.image_size": 64}, "data.image_size=64 differs from model.image_size=96"),
    ({"data.crop": 3}, r"data.crop=3 must be one of center, random, saliency\.$"),
    ({"data.crop": "centre"}, r"must be one of center, random, saliency\. Did you mean center\?"),
    ({"ema.post_hoc": [0.1]}, r"ema.post_hoc=\[0.1\] builds .* of which checkpoint.keep_last=2 keeps the newest\. Set"),
    (
        {"checkpoint.keep_best": 1, "checkpoint.best_metric": "validate/loss"},
        r"checkpoint.best_metric=validate/loss is never measured\. Set validate.every_steps",
    ),
    ({"run.resume": "/absent"}, "/absent must be auto, never, or the path of a checkpoint that exists"),
]


def changed(cfg: DictConfig, values: dict[str, object]) -> DictConfig:
    with open_dict(cfg):
        for key, value in values.items():
            OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_train_is_refused_by_key(tiny: DictConfig, values: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        preflight(changed(tiny, values), ranks=1)


@pytest.mark.parametrize(
    "values",
    [
        {"validate.logsnr": [0.0]},
        {"checkpoint.keep_best": 1, "checkpoint.best_metric": "loss"},
        {
            "checkpoint.keep_best": 1,
            "checkpoint.best_metric": "validate_ema/loss",
            "validate.every_epochs": 1,
            "validate.share": 0.1,
        },
        {"ema.post_hoc": [0.1], "checkpoint.keep_every_steps": 10},
        {"ema.post_hoc": [0.1], "checkpoint.keep_last": None, "checkpoint.every_steps": None},
        {"run.resume": "never"},
        {"run.resume": "/"},
        {"train.max_steps": None, "train.max_epochs": 1},
        {"train.max_steps": None, "data.num_examples_to_see": 8},
    ],
)
def test_what_can_train_passes(tiny: DictConfig, values: dict[str, object]):
    preflight(changed(tiny, values), ranks=1)


def test_a_run_that_goes_on_may_have_lost_where_it_began(tiny: DictConfig, tmp_path: Path):
    cfg = changed(tiny, {"run.resume": "/absent", "run.dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="run.resume=/absent must be auto, never, or the path of a checkpoint"):
        preflight(cfg, ranks=1)
    for name in ("config.yaml", "environment.json"):
        (tmp_path / name).touch()
    preflight(cfg, ranks=1)


def test_component_outside_the_allowed_packages_needs_a_word(tiny: DictConfig):
    tiny.optimizer.algorithm = {"_target_": "textwrap.dedent", "_partial_": True}
    with pytest.raises(ConfigError, match="names the package 'textwrap'"):
        preflight(tiny, ranks=1)
    tiny.run.allowed_packages = ["cascade_train", "textwrap"]
    preflight(tiny, ranks=1)
    tiny.run.allowed_packages = ["cascade_train"]
    tiny.run.allow_any_target = True
    preflight(tiny, ranks=1)


def test_held_out_files_need_data_that_reads_files(tiny: DictConfig):
    tiny.validate.urls = ["b.tar"]
    preflight(tiny, ranks=1)
    with open_dict(tiny):
        tiny.data = composed("model=c_tiny", "task=lora").data
    with pytest.raises(ConfigError, match="validate.urls=b.tar are tars, and .*Shapes has no data.urls"):
        preflight(tiny, ranks=1)


@pytest.mark.parametrize(
    ("key", "choice", "library"),
    [(key, choice, library) for key in EXTRAS for choice, library in EXTRAS[key].items()],
)
def test_choice_whose_library_is_not_installed_is_refused(
    tiny: DictConfig, monkeypatch: pytest.MonkeyPatch, key: str, choice: str, library: str
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))
    OmegaConf.update(tiny, key, choice)
    tiny.tracker.project = "p"
    with pytest.raises(ConfigError, match=rf"{key}={choice} needs the library {library}.*editable '\.\[{choice}\]'"):
        preflight(tiny, ranks=1)


def test_task_that_does_not_fit_the_stage_is_refused_with_what_does(
    tiny: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "strange_tasks.py").write_text(
        "from cascade_train.tasks.lora import LoRA\nclass ForB(LoRA):\n    fits = ('stage_b',)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny.task._target_ = "strange_tasks.ForB"
    tiny.run.allowed_packages = ["cascade_train", "torch", "strange_tasks"]
    message = "trains stage_b, but model=c_tiny is stage_c. Tasks that fit stage_c: .*lora.*fit this task: "
    with pytest.raises(ConfigError, match=message):
        preflight(tiny, ranks=1)


def test_automatic_precision_is_what_the_model_is_meant_for(tiny: DictConfig):
    assert preflight(tiny, ranks=1).train.precision is Precision.fp32
    tiny.model.precision = "bf16"
    assert preflight(tiny, ranks=1).train.precision is Precision.bf16
    tiny.train.precision = Precision.fp32
    assert preflight(tiny, ranks=1).train.precision is Precision.fp32


@pytest.mark.parametrize(("own", "reason"), [(None, "has no precision"), ("fp8", "model.precision=fp8 is none")])
def test_automatic_precision_asks_for_one_where_the_model_has_none(tiny: DictConfig, own: str | None, reason: str):
    root = OmegaConf.to_object(tiny)
    root.model["precision"] = own
    with pytest.raises(ConfigError, match=f"train.precision=auto takes that of the model, and .*{reason}"):
        precision(root)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reconstruction", "a_tiny", "gdf"],
            r"objective=gdf does not train model=a_tiny .* but b_3b, b_700m or b_tiny\. For model=a_tiny, "
            r"choose objective=vqgan\.$",
        ),
        (
            ["reconstruction", "a_tiny", "preview"],
            r"does not train model=a_tiny \(stage_a\) but c_1b, c_3b or c_tiny\.",
        ),
        (["reconstruction", "b_tiny", "vqgan"], r"^task=reconstruction with objective=vqgan .* but a or a_tiny\."),
        (
            ["reconstruction", "b_tiny", "preview"],
            r"choose objective=adaptive, constant, debiased, edm, .*, v or x0\.$",
        ),
        (["reconstruction", "c_tiny", "gdf"], r"b_700m or b_tiny\. For model=c_tiny, choose objective=preview\.$"),
        (["reconstruction", "c_tiny", "vqgan"], r"For model=c_tiny, choose objective=preview\.$"),
        (
            ["finetune", "c_tiny", "preview"],
            r"does not train model=c_tiny \(stage_c\)\. .*objective=adaptive, constant, debiased, edm",
        ),
        (
            ["finetune", "sd_tiny", "gdf"],
            r"^objective.noise_condition=CosineTimeCondition gives the network a time for noise level, and that of "
            r"model=sd_tiny was made for a timestep\. "
            r"Choose objective=ddpm, ddpm_debiased, ddpm_min_snr, ddpm_v, edm or edm_sdxl\.$",
        ),
        (
            ["finetune", "c_tiny", "ddpm_v"],
            r"Choose objective=adaptive, constant, debiased, edm, edm_sdxl, gdf, .*, v or x0\.$",
        ),
        (
            ["reconstruction", "sd_tiny", "ddpm"],
            r"task=reconstruction trains .*but model=sd_tiny is stable_diffusion\.",
        ),
        (["reconstruction", "sdxl_tiny", "ddpm"], r"Tasks that fit stable_diffusion_xl: controlnet, finetune, lora;"),
    ],
)
def test_an_objective_for_something_else_is_refused(overrides: list[str], message: str):
    task, model, objective = overrides
    with pytest.raises(ConfigError, match=message):
        checked(f"task={task}", f"model={model}", f"objective={objective}")
