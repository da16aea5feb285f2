"""Tasks on Stable Diffusion: their contracts, and a step as diffusers and torch alone compute it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)

from cascade_train.batch import Batch
from cascade_train.errors import ConfigError
from cascade_train.models.lora import adapted_layers
from cascade_train.models.text_encoder import PACKAGED_TOKENIZER, clip_tokenizer
from cascade_train.tasks.base import SampleSettings
from tests.unit.models.stages import make_stage
from tests.unit.tasks.as_diffusers import assert_equal_gradients, reference_loss
from tests.unit.tasks.task_contract import TaskContract, attached, component, left, make_batch

FAMILIES = {"sd_tiny": StableDiffusionPipeline, "sdxl_tiny": StableDiffusionXLPipeline}
PROMPTS = ["a small red circle", "a large blue square on a green background"]


class TestFinetuneOfSd(TaskContract):
    """Those of SDXL are in test_text_towers.py."""

    option, model, objective = "finetune", "sd_tiny", "ddpm_v"


def framed_batch(side: int = 32) -> Batch:
    """Return a batch of pictures of known sizes, each cropped at a place of its own."""
    return replace(
        make_batch(0, 1, 2, side=side),
        original_size_B2=torch.tensor([[64, 48], [40, 100], [32, 32]]),
        crop_B4=torch.tensor([[16, 0, 48, 48], [0, 30, 40, 40], [0, 0, 32, 32]]),
    )


TIME_IDS = torch.tensor([[64, 48, 11, 0, 32, 32], [40, 100, 0, 24, 32, 32], [32, 32, 0, 0, 32, 32]])
"""As diffusers' train_text_to_image_sdxl.py has them: the picture is resized first, and the crop counts after it."""


@pytest.fixture(scope="module", params=FAMILIES)
def pipelines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """The name of a family, a task on it, and the pipeline that it leaves."""
    task = attached(component("task", "finetune", cond_drop_prob=0.0), request.param, component("objective", "ddpm"))
    return request.param, task, left(task, "pipeline", tmp_path_factory.mktemp(request.param))


def test_a_training_step_is_that_of_diffusers_and_torch(pipelines: tuple[str, Any, Path]) -> None:
    _, task, folder = pipelines
    batch = framed_batch()
    prepared = task.prepare_batch(batch)
    network = task.stage.network
    network.zero_grad()
    output = task.loss(prepared)
    output.loss_B.mean().backward()
    pipeline = DiffusionPipeline.from_pretrained(folder)
    expected_B = reference_loss(pipeline, batch, prepared, time_ids=TIME_IDS)
    expected_B.mean().backward()
    torch.testing.assert_close(output.loss_B, expected_B, atol=1e-5, rtol=1e-5)
    assert all(parameter.grad.any() for parameter in network.parameters())
    assert_equal_gradients(network, pipeline.unet)
    network.zero_grad()


@pytest.mark.parametrize("negative", ["", "a large blue square"])
def test_pictures_of_the_pipeline_are_those_of_our_sampler(pipelines: tuple[str, Any, Path], negative: str) -> None:
    family, task, folder = pipelines
    pipeline = FAMILIES[family].from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    settings = SampleSettings(sampler="ddim", steps=5, guidance_scale=4.0, shift=1.0, negative_prompt=negative)
    size = (32, 40)

    def draws(_: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(2)]

    start = torch.stack([torch.randn(*task.stage.latent_shape(*size), generator=g) for g in draws("")])
    ours = task.image_sampler(settings, size).sample(PROMPTS, None, draws)
    asked: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 4.0, "height": 32, "width": 40}
    theirs = pipeline(PROMPTS, latents=start, negative_prompt=[negative] * 2, output_type="pt", **asked).images
    assert ours.shape == theirs.shape == (2, 3, *size)
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_the_captions_of_the_pipeline_are_encoded_as_in_training(pipelines: tuple[str, Any, Path]) -> None:
    family, task, folder = pipelines
    pipeline = FAMILIES[family].from_pretrained(folder)
    found = pipeline.encode_prompt(PROMPTS, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True)
    cond = task.stage.conditions(task.stage.tokenize([*PROMPTS, "", ""]))
    torch.testing.assert_close(torch.cat(found[:2]), cond["encoder_hidden_states"], atol=1e-5, rtol=1e-4)
    if family == "sdxl_tiny":
        torch.testing.assert_close(torch.cat(found[2:]), cond["text_embeds"], atol=1e-5, rtol=1e-4)


def test_tokenizers_have_the_files_of_older_programs(pipelines: tuple[str, Any, Path]) -> None:
    family, task, folder = pipelines
    for name in ("tokenizer", *(("tokenizer_2",) if family == "sdxl_tiny" else ())):
        own, packaged = folder / name, PACKAGED_TOKENIZER
        assert json.loads((own / "vocab.json").read_text()) == json.loads((packaged / "vocab.json").read_text())
        merges = [(each / "merges.txt").read_text().splitlines()[1:] for each in (own, packaged)]
        assert merges[0] == merges[1]
        assert clip_tokenizer(folder / name)(PROMPTS).input_ids == task.stage.text_encoder.tokenizer(PROMPTS).input_ids


def test_velocity_and_zero_terminal_snr_are_in_the_pipelines_scheduler(tmp_path: Path) -> None:
    objective = component("objective", "ddpm_v", schedule={"rescale_betas_zero_snr": True})
    task = attached(component("task", "finetune"), "sd_tiny", objective)
    config = StableDiffusionPipeline.from_pretrained(left(task, "pipeline", tmp_path)).scheduler.config
    assert config["prediction_type"] == "v_prediction"
    assert config["rescale_betas_zero_snr"]
    assert config["timestep_spacing"] == "trailing"


def test_a_network_of_edm_leaves_a_pipeline_with_its_scheduler(tmp_path: Path) -> None:
    task = attached(component("task", "finetune"), "sdxl_tiny", component("objective", "edm_sdxl"))
    scheduler = StableDiffusionXLPipeline.from_pretrained(left(task, "pipeline", tmp_path)).scheduler
    assert type(scheduler).__name__ == "EDMEulerScheduler"
    assert (scheduler.config["sigma_data"], scheduler.config["sigma_max"]) == (0.5, 80.0)


def test_a_network_whose_objective_diffusers_does_not_sample_is_left_alone(tmp_path: Path) -> None:
    task = attached(component("task", "finetune"), "sd_tiny", component("objective", "edm"))
    assert [path.name for path in left(task, "pipeline", tmp_path).glob("[!.]*")] == ["unet"]


def test_adapters_load_into_diffusers_pipeline(pipelines: tuple[str, Any, Path], tmp_path: Path) -> None:
    family, _, folder = pipelines
    options = {"module_filters": [".attn", "conv1"], "rank": 2, "alpha": 4.0}
    task = attached(component("task", "lora", **options), family, component("objective", "ddpm"))
    generator = torch.Generator().manual_seed(0)
    for _, layer in adapted_layers(task.stage.network):
        layer.lora_B["default"].weight.data.normal_(0.0, 0.1, generator=generator)
    adapters = left(task, "lora", tmp_path)
    pipeline = FAMILIES[family].from_pretrained(folder)
    cond = task.stage.conditions(task.stage.tokenize(PROMPTS))
    latents, timestep = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([500.0, 10.0])
    named = {"sample": latents, "timestep": timestep, "encoder_hidden_states": cond["encoder_hidden_states"]}
    if family == "sdxl_tiny":
        ids = torch.tensor([[32.0, 32, 0, 0, 32, 32]]).expand(2, 6)
        named["added_cond_kwargs"] = {"text_embeds": cond["text_embeds"], "time_ids": ids}
    before = pipeline.unet(**named).sample
    pipeline.load_lora_weights(adapters)
    after = pipeline.unet(**named).sample
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, task.stage.predict(latents, timestep, cond), atol=1e-5, rtol=1e-4)


def test_queries_of_latents_share_nothing_with_keys_of_text() -> None:
    with pytest.raises(ConfigError, match="take different inputs, of latents and of text"):
        attached(component("task", "lora", joint_qkv=True), "sd_tiny", component("objective", "ddpm"))


def test_an_image_is_no_condition() -> None:
    task = component("task", "finetune", image_keep_prob=0.5)
    with pytest.raises(ConfigError, match=r"image_keep_prob=0\.5: an image is no condition of stable_diffusion;"):
        task.check_stage(make_stage("sd_tiny"))


def test_an_autoencoder_is_of_its_own_class(pipelines: tuple[str, Any, Path]) -> None:
    loaded = AutoencoderKL.from_pretrained(pipelines[2] / "vae")
    found = pipelines[1].stage.vae.module.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in loaded.state_dict().items())
