"""Folders of diffusers' pipelines as what commands read: painted with, merged into, and written as one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.errors import ConfigError
from cascade_train.results.find import pipeline_config
from tests.integration.runs import train
from tests.unit.models.stages import untrained

pytestmark = pytest.mark.slow

SHORT = (
    *(
        *untrained("sdxl_tiny"),
        "train.global_batch_size=2",
        "train.max_steps=1",
        "data.num_workers=0",
        "data.samples=12",
    ),
    *("checkpoint.every_steps=null", "optimizer.lr=1e-2"),
)
PARTS = tuple(f"model.{name}.weights=null" for name in ("text_encoder", "text_encoder_2", "vae"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("xl") / "xl", "task=finetune", "objective=ddpm_v", *SHORT)


@pytest.fixture(scope="module")
def bare(run: Path) -> Path:
    """The pipeline alone, as somebody else would have it."""
    return shutil.copytree(run / "export" / "pipeline", run.with_name("bare"))


def test_a_pipelines_configuration_is_that_of_its_run(run: Path, bare: Path) -> None:
    cfg, saved = pipeline_config(str(bare)), OmegaConf.load(run / "config.yaml")
    assert cfg.model.network == saved.model.network
    assert cfg.model.image_size == saved.model.image_size
    assert cfg.objective.target == saved.objective.target
    assert cfg.objective.schedule == saved.objective.schedule
    own = (
        "hidden_size",
        "num_hidden_layers",
        "projection_dim",
        "hidden_act",
        "max_tokens",
        "vocab_size",
        "hidden_layer",
    )
    for tower in ("text_encoder", "text_encoder_2"):
        assert {key: cfg.model[tower][key] for key in own} == {key: saved.model[tower][key] for key in own}


def test_noise_levels_of_edm_are_those_of_the_scheduler(bare: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bare, tmp_path / "edm")
    stored = {"_class_name": "EDMEulerScheduler", "sigma_min": 0.01, "sigma_max": 50.0, "sigma_data": 0.8, "rho": 5.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(stored))
    objective = pipeline_config(str(folder)).objective
    assert (list(objective.schedule.sigma_range), objective.schedule.p) == ([0.01, 50.0], 5.0)
    assert objective.scaling.sigma_data == objective.target.sigma_data == 0.8


def test_pictures_of_a_bare_pipeline_are_those_of_its_run(run: Path, bare: Path, tmp_path: Path) -> None:
    asked = ["prompts=[a red circle]", "steps=4", "guidance_scale=3"]
    pictures = []
    for name, source in (("one", run), ("other", bare)):
        assert launch(["generate", f"from={source}", *asked, f"out={tmp_path / name}"]) == 0
        with Image.open(tmp_path / name / "00_00.png") as picture:
            pictures.append(np.asarray(picture).astype(float))
    assert pictures[0].shape == (32, 32, 3)
    assert pictures[0].std() > 5
    assert np.abs(pictures[0] - pictures[1]).mean() < 3, "the one computes in fp32, the other in bf16"


def test_adapters_merge_into_a_bare_pipeline_and_into_its_run(run: Path, bare: Path, tmp_path: Path) -> None:
    lora = train(tmp_path / "lora", "task=lora", *SHORT, f"model.weights={run}", *PARTS)
    assert launch(["export", f"from={lora}", "format=kohya"]) == 0
    merged = []
    for name, source, adapters in (("one", run, lora), ("other", bare, lora / "export" / "lora.kohya.safetensors")):
        assert launch(["merge", f"from={source}", f"lora={adapters}", f"out={tmp_path / name}"]) == 0
        merged.append(load_file(tmp_path / name / "diffusion_pytorch_model.safetensors"))
    base = load_file(bare / "unet" / "diffusion_pytorch_model.safetensors")
    assert any(not torch.equal(value, base[name]) for name, value in merged[0].items())
    assert all(torch.equal(value, merged[1][name]) for name, value in merged[0].items())


def test_a_run_is_written_as_one_file_and_trains_on_from_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["export", f"from={run / 'export'}", "format=single_file", f"out={tmp_path}"]) == 0
    file = tmp_path / "pipeline.safetensors"
    assert f"{file}: read back with a relative error of 0.0e+00" in capsys.readouterr().out
    assert "from_single_file" in (tmp_path / "README.md").read_text()
    on = train(tmp_path / "on", "task=finetune", *SHORT, f"model.weights={file}", *PARTS)
    assert (on / "export" / "pipeline" / "unet").is_dir()
    assert (
        launch(["export", f"from={run / 'export' / 'pipeline' / 'unet'}", "format=single_file", f"out={tmp_path}"]) == 2
    )
    assert "holds no pipeline that is written as one file" in capsys.readouterr().err


def test_a_folder_without_its_parts_is_refused(bare: Path, tmp_path: Path) -> None:
    shutil.copy(bare / "model_index.json", tmp_path)
    with pytest.raises(ConfigError, match=r"the pipeline has no scheduler_config\.json; copy the whole folder"):
        pipeline_config(str(tmp_path))
    whole = shutil.copytree(bare, tmp_path / "whole")
    (whole / "vae" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks block_out_channels; save the pipeline by diffusers again"):
        pipeline_config(str(whole))


def with_scheduler(bare: Path, folder: Path, **changed: object) -> str:
    """Return a copy of the pipeline whose scheduler has these settings."""
    file = shutil.copytree(bare, folder) / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return str(folder)


def test_an_autoencoder_of_an_older_folder_has_the_defaults_of_diffusers(bare: Path, tmp_path: Path) -> None:
    file = shutil.copytree(bare, tmp_path / "older") / "vae" / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in stored.items() if name != "scaling_factor"}))
    assert pipeline_config(str(tmp_path / "older")).model.vae.scaling_factor == 0.18215


def test_clean_latents_are_the_target_of_a_pipeline_that_predicts_them(bare: Path, tmp_path: Path) -> None:
    objective = pipeline_config(with_scheduler(bare, tmp_path / "x0", prediction_type="sample")).objective
    assert objective.target._target_ == "cascade_train.diffusion.target.X0Target"
    assert objective.schedule.beta_schedule == "scaled_linear"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prediction_type": "flow_prediction"}, "DDIMScheduler with prediction_type=flow_prediction, belongs to no"),
        ({"_class_name": "EDMEulerScheduler"}, "EDMEulerScheduler with prediction_type=v_prediction, belongs to no"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "prediction_type": "epsilon"}, "FlowMatch.* belongs to no"),
        ({"trained_betas": [0.1, 0.2]}, "prediction_type=v_prediction and trained_betas, belongs to no objective here"),
    ],
)
def test_a_scheduler_without_an_objective_is_refused(
    bare: Path, tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*Give the pipeline the scheduler that its network was"):
        pipeline_config(with_scheduler(bare, tmp_path / "other", **changed))
