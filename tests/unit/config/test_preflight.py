import importlib.util
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from cascade_train.config.preflight import EXTRAS, precision, preflight
from cascade_train.config.schema import ParallelMode, Precision
from cascade_train.errors import ConfigError
from tests.unit.config.composing import composed


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


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 4), (4, 2)])
def test_ranks_leave_the_global_batch_unchanged(tiny: DictConfig, ranks: int, micro: int):
    tiny.train.global_batch_size = 8
    assert preflight(tiny, ranks=ranks).train.micro_batch_size == micro


def test_ranks_come_from_the_environment(tiny: DictConfig, monkeypatch: pytest.MonkeyPatch):
    tiny.train.global_batch_size = 8
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 ranks: 6 or 9"):
        preflight(tiny)


def test_single_on_several_ranks_is_refused(tiny: DictConfig):
    tiny.parallel.mode = ParallelMode.single
    preflight(tiny, ranks=1)
    with pytest.raises(ConfigError, match="parallel=single runs on one rank, but 2 were started"):
        preflight(tiny, ranks=2)


def test_shard_size_belongs_to_hsdp_and_divides_the_ranks(tiny: DictConfig):
    tiny.parallel.shard_size = 2
    with pytest.raises(ConfigError, match="parallel.shard_size=2 is for parallel=hsdp, not auto"):
        preflight(tiny, ranks=4)
    tiny.parallel.mode = ParallelMode.hsdp
    preflight(tiny, ranks=4)
    with pytest.raises(ConfigError, match="parallel.shard_size=2 does not divide the 1 ranks"):
        preflight(tiny, ranks=1)


def test_all_missing_values_are_named_at_once(tiny: DictConfig):
    tiny.data.urls = "???"
    tiny.model.text_encoder.max_tokens = "???"
    with pytest.raises(ConfigError, match=r"data.urls is not set.*Also missing: model.text_encoder.max_tokens\."):
        preflight(tiny, ranks=1)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train.max_stepz", r"train.max_stepz is unknown. Did you mean train.max_steps\?"),
        ("foo", "foo is unknown. Known here: model, task"),
    ],
)
def test_key_added_to_a_typed_node_is_refused(tiny: DictConfig, key: str, message: str):
    with open_dict(tiny):
        OmegaConf.update(tiny, key, 3, force_add=True)
    with pytest.raises(ConfigError, match=message):
        preflight(tiny, ranks=1)


def test_component_outside_the_allowed_packages_needs_a_word(tiny: DictConfig):
    tiny.optimizer.algorithm = {"_target_": "textwrap.dedent", "_partial_": True}
    with pytest.raises(ConfigError, match="names the package 'textwrap'"):
        preflight(tiny, ranks=1)
    tiny.run.allowed_packages = ["cascade_train", "textwrap"]
    preflight(tiny, ranks=1)
    tiny.run.allowed_packages = ["cascade_train"]
    tiny.run.allow_any_target = True
    preflight(tiny, ranks=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_finite(tiny: DictConfig, value: float):
    tiny.validate.logsnr = [0.0, value]
    with pytest.raises(ConfigError, match=rf"validate.logsnr\[1\]={value} must be a finite number"):
        preflight(tiny, ranks=1)
    tiny.validate.logsnr = [0.0]
    tiny.optimizer.lr = value
    with pytest.raises(ConfigError, match=rf"optimizer.lr={value} must be a finite number"):
        preflight(tiny, ranks=1)


def test_pictures_have_the_size_that_the_model_trains_on(tiny: DictConfig):
    tiny.data.image_size = 64
    with pytest.raises(ConfigError, match="data.image_size=64 differs from model.image_size=96"):
        preflight(tiny, ranks=1)


def test_held_out_files_need_data_that_reads_files(tiny: DictConfig):
    tiny.validate.urls = ["b.tar"]
    preflight(tiny, ranks=1)
    with open_dict(tiny):
        tiny.data = composed("model=c_tiny", "task=lora").data
    with pytest.raises(ConfigError, match="validate.urls=b.tar needs data that reads files, and .*Shapes reads none"):
        preflight(tiny, ranks=1)


@pytest.mark.parametrize("value", ["first", 3])
def test_an_argument_with_a_list_of_words_names_them(tiny: DictConfig, value: object):
    tiny.data.crop = value
    with pytest.raises(ConfigError, match=rf"data.crop={value} must be one of center, random, saliency\.$"):
        preflight(tiny, ranks=1)
    tiny.data.crop = "centre"
    with pytest.raises(ConfigError, match=r"must be one of center, random, saliency\. Did you mean center\?"):
        preflight(tiny, ranks=1)


def test_a_rollback_needs_checkpoints(tiny: DictConfig):
    tiny.rollback.enabled = True
    preflight(tiny)
    tiny.checkpoint.every_steps = None
    with pytest.raises(ConfigError, match=r"rollback.enabled=true goes back to checkpoints"):
        preflight(tiny)


def test_resume_is_a_word_or_a_path_that_exists(tiny: DictConfig, tmp_path: Path):
    for resume in ("auto", "never", str(tmp_path)):
        tiny.run.resume = resume
        preflight(tiny, ranks=1)
    tiny.run.resume = str(tmp_path / "absent")
    with pytest.raises(ConfigError, match="absent must be auto, never, or the path of a checkpoint that exists"):
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


def test_precision_that_is_given_stays(tiny: DictConfig):
    tiny.train.precision = Precision.bf16
    assert preflight(tiny, ranks=1).train.precision is Precision.bf16


def test_automatic_precision_is_what_the_model_is_meant_for(tiny: DictConfig):
    assert preflight(tiny, ranks=1).train.precision is Precision.fp32
    tiny.model.precision = "bf16"
    assert preflight(tiny, ranks=1).train.precision is Precision.bf16


@pytest.mark.parametrize(("own", "reason"), [(None, "has no precision"), ("fp8", "model.precision=fp8 is none")])
def test_automatic_precision_asks_for_one_where_the_model_has_none(tiny: DictConfig, own: str | None, reason: str):
    root = OmegaConf.to_object(tiny)
    root.model["precision"] = own
    with pytest.raises(ConfigError, match=f"train.precision=auto takes that of the model, and .*{reason}"):
        precision(root)
