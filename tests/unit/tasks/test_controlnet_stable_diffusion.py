"""Control networks of Stable Diffusion: a step and pictures as diffusers and torch alone make them, and files."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from safetensors.torch import load_file, save_file
from torch import nn

from cascade_train.errors import ConfigError
from cascade_train.models.stable_diffusion.control import FIRST_LAYER, read_controlnet
from cascade_train.models.stable_diffusion.formats.original_names import unet_modules
from cascade_train.models.stable_diffusion.networks.unet import empty_controlnet
from cascade_train.tasks.base import Guide, SampleSettings
from tests.unit.models.stages import build_stage
from tests.unit.tasks.as_diffusers import assert_equal_gradients, reference_loss
from tests.unit.tasks.task_contract import CPU, TaskContract, batch_for, component, left

FAMILIES = {"sd_tiny": StableDiffusionControlNetPipeline, "sdxl_tiny": StableDiffusionXLControlNetPipeline}
PROMPTS = ["a small red circle", "a large blue square on a green background"]


class TestControlNetOfSd(TaskContract):
    option, model, objective = "controlnet", "sd_tiny", "ddpm"
    changes = {"control_drop_prob": 0.5}


def make(model: str = "sd_tiny", option: str = "controlnet", **changes: Any) -> Any:
    """Return a task attached to a stage with its own first values."""
    task = component("task", option, **changes)
    task.check_stage(stage := build_stage(model))
    task.attach(stage, component("objective", "ddpm"), CPU)
    return task


def audible(task: Any) -> Any:
    """Give the layers that begin at zero values, as after some training."""
    with torch.no_grad():
        for number, parameter in enumerate(task.controlnet.parameters()):
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    return task


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """The name of a family, a task on it, and the folder of its export beside the pipeline of its frozen stage."""
    folder = tmp_path_factory.mktemp(request.param)
    left(make(request.param, "finetune"), "pipeline", folder)
    task = audible(make(request.param, cond_drop_prob=0.0))
    left(task, "controlnet", folder)
    return request.param, task, folder


def test_a_new_one_has_the_values_of_the_network_and_no_effect(tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = tmp_path / family
        pipeline = DiffusionPipeline.from_pretrained(left(make(family, "finetune"), "pipeline", folder))
        task = make(family)
        expected = ControlNetModel.from_unet(pipeline.unet, conditioning_embedding_out_channels=(16, 32, 96))
        found = task.controlnet.state_dict()
        assert found.keys() == expected.state_dict().keys()
        theirs = {n: v for n, v in expected.state_dict().items() if not n.startswith("controlnet_cond_embedding.")}
        assert len(theirs) > 20
        assert all(torch.equal(found[name], value) for name, value in theirs.items())
        assert found["controlnet_cond_embedding.conv_in.weight"].std() > 0.05
        assert not found["controlnet_cond_embedding.conv_out.weight"].any()
        prepared, alone = task.prepare_batch(batch_for(task, 0, 1)), make(family, "finetune")
        alone.stage.network.eval()
        assert torch.equal(task.loss(prepared).loss_B, alone.loss(prepared).loss_B)


def test_a_training_step_is_that_of_diffusers_and_torch(trained: tuple[str, Any, Path]) -> None:
    _, task, folder = trained
    batch = batch_for(task, 0, 1, 2)
    prepared = task.prepare_batch(batch)
    assert prepared.control_BCHW.any()
    task.controlnet.zero_grad()
    output = task.loss(prepared)
    output.loss_B.mean().backward()
    reference = ControlNetModel.from_pretrained(folder / "controlnet")
    pipeline = DiffusionPipeline.from_pretrained(folder / "pipeline")
    expected_B = reference_loss(pipeline, batch, prepared, control=reference)
    expected_B.mean().backward()
    torch.testing.assert_close(output.loss_B, expected_B, atol=1e-5, rtol=1e-5)
    assert all(parameter.grad.any() for parameter in task.controlnet.parameters())
    assert_equal_gradients(task.controlnet, reference)
    task.controlnet.zero_grad()


def test_recomputed_it_trains_alike() -> None:
    task, found = audible(make(cond_drop_prob=0.0)), []
    prepared = task.prepare_batch(batch_for(task, 0, 1))
    for recomputes in (False, True):
        task.stage.set_activation_checkpointing(recomputes)
        assert task.controlnet.down_blocks[0].gradient_checkpointing == recomputes
        task.controlnet.zero_grad()
        task.loss(prepared).loss_B.sum().backward()
        found.append([parameter.grad.clone() for parameter in task.controlnet.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_pictures_of_the_pipeline_are_those_of_our_sampler(trained: tuple[str, Any, Path]) -> None:
    family, task, folder = trained
    controlnet = ControlNetModel.from_pretrained(folder / "controlnet")
    pipeline = FAMILIES[family].from_pretrained(folder / "pipeline", controlnet=controlnet)
    pipeline.set_progress_bar_config(disable=True)
    edges = torch.zeros(2, 3, 32, 40)
    edges[0, :, 10:20, 8:12] = edges[1, :, 4:8, 20:30] = 1.0

    def draws(_: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(2)]

    start = torch.stack([torch.randn(*task.stage.latent_shape(32, 40), generator=g) for g in draws("")])
    image_sampler = task.image_sampler(SampleSettings(sampler="ddim", steps=5, guidance_scale=4.0, shift=1.0), (32, 40))
    guide = Guide(image_BCHW=(edges * 255).to(torch.uint8), is_map=True, strength=0.7, numbers=(0, 1))
    ours = image_sampler.sample(PROMPTS, None, draws, guide)
    options = {"height": 32, "width": 40, "num_inference_steps": 5, "guidance_scale": 4.0, "output_type": "pt"}
    weight = {"controlnet_conditioning_scale": 0.7}
    theirs = pipeline(PROMPTS, image=edges, latents=start, **options, **weight).images
    assert (
        image_sampler.sample(PROMPTS, None, draws, Guide(**vars(guide) | {"strength": 0.0})) - ours
    ).abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_a_run_trains_on_from_what_one_left(
    trained: tuple[str, Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, task, folder = trained
    with caplog.at_level(logging.WARNING):
        for source in (folder / "controlnet", folder / "controlnet" / "diffusion_pytorch_model.safetensors"):
            again = make(family, weights=str(source), seed=7).controlnet
            state = task.controlnet.state_dict()
            assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
            assert all(p.requires_grad and p.dtype == torch.float32 for p in again.parameters())
        assert not caplog.text
        make(family, weights=str(folder / "controlnet"), filter={"low": 50.0})
    assert "was trained on maps of" in caplog.text
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "controlnet").symlink_to(folder / "controlnet")
    fresh = make(family)
    fresh.load_export(tmp_path / "export")
    assert torch.equal(fresh.controlnet.controlnet_mid_block.weight, task.controlnet.controlnet_mid_block.weight)


def test_files_of_the_original_code_are_read(tmp_path: Path) -> None:
    stage = build_stage("sd_tiny")
    network = empty_controlnet(stage.network, channels=3, stride=8).to_empty(device="cpu")
    for number, parameter in enumerate(network.parameters()):
        nn.init.constant_(parameter, float(number))
    state = network.state_dict()
    own = unet_modules(name.rpartition(".")[0] for name in state if not name.startswith("controlnet_"))
    stored = {f"control_model.{original_name(name, own)}": value.contiguous() for name, value in state.items()}
    save_file(stored, tmp_path / "a.safetensors")
    found, made_by = read_controlnet(str(tmp_path / "a.safetensors"), dict(stage.network.config), key="task.weights")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert (found[FIRST_LAYER].shape[1], made_by) == (3, None)


def original_name(name: str, own: dict[str, str]) -> str:
    """Return the name of a control network's tensor in the original code."""
    stem, leaf = name.rsplit(".", 1)
    if (match := re.fullmatch(r"controlnet_down_blocks\.(\d+)", stem)) is not None:
        return f"zero_convs.{match[1]}.0.{leaf}"
    if stem == "controlnet_mid_block":
        return f"middle_block_out.0.{leaf}"
    if stem.startswith("controlnet_cond_embedding."):
        inner = stem.removeprefix("controlnet_cond_embedding.")
        number = {"conv_in": 0, "conv_out": 14}.get(inner)
        number = 2 * (int(inner.rpartition(".")[2]) + 1) if number is None else number
        return f"input_hint_block.{number}.{leaf}"
    return f"{own[stem]}.{leaf}"


def test_what_does_not_fit_is_refused(trained: tuple[str, Any, Path], tmp_path: Path) -> None:
    family, _, folder = trained
    other = "sd_tiny" if family == "sdxl_tiny" else "sdxl_tiny"
    with pytest.raises(ConfigError, match="no control network of this model .* choose the model= that it was trained"):
        make(other, weights=str(folder / "controlnet"))
    with pytest.raises(ConfigError, match="holds no control network of Stable Diffusion, but add_embedding|conv_in"):
        make(family, weights=str(folder / "pipeline" / "unet"))
    state = load_file(folder / "controlnet" / "diffusion_pytorch_model.safetensors")
    name = "controlnet_cond_embedding.conv_in.weight"
    save_file(state | {name: state[name].repeat(1, 2, 1, 1)}, tmp_path / "six.safetensors")
    with pytest.raises(ConfigError, match="takes maps of 6 channels, task.filter makes 3; choose its filter"):
        make(family, weights=str(tmp_path / "six.safetensors"))


@pytest.mark.parametrize(
    ("name", "value"), [("global_pool_conditions", True), ("controlnet_conditioning_channel_order", "bgr")]
)
def test_what_no_tensor_shows_is_read_of_the_configuration(
    trained: tuple[str, Any, Path], name: str, value: Any, tmp_path: Path
) -> None:
    family, _, folder = trained
    other = shutil.copytree(folder / "controlnet", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ConfigError, match=f"has {name}={value} in its config.json"):
        make(family, weights=str(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [0]}, r"task\.blocks=\[0\]: is for control networks of Stage C; .* Set it to null\."),
        ({"bottleneck": "small"}, r"task\.bottleneck=small: is for control networks of Stage C; .* Set it to effnet\."),
        ({"backbone_weights": "imagenet"}, r"task\.backbone_weights=imagenet: is for control networks of Stage C"),
    ],
)
def test_options_of_stage_c_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize(("channels", "taken"), [(1, 3), (2, 2), (3, 3), (4, 4)])
def test_a_grey_map_becomes_a_picture_and_any_other_stays_as_it_is(channels: int, taken: int) -> None:
    task = make()
    options = dataclasses.replace(task._options(), channels=channels)
    control = task.stage.add_control(options, CPU)
    residuals = control.residuals(torch.rand(1, channels, 32, 32))
    cond = task.stage.conditions(task._tokens(["a red circle"]))
    found = residuals(torch.zeros(1, 4, 8, 8), torch.zeros(1), cond)
    assert control.module.config.conditioning_channels == taken
    assert not any(each.any() for each in found.values())


def test_maps_of_another_size_are_refused() -> None:
    task = make()
    with pytest.raises(ConfigError, match="made maps of 8 x 8 pixels of pictures of 32 x 32; the control networks of"):
        task._control.residuals(torch.zeros(1, 1, 8, 8))(torch.zeros(2, 4, 8, 8), torch.zeros(2), {})
