"""Full training: every weight of the network, and a prior that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableCascadePriorPipeline
from safetensors.torch import save_file

from cascade_train.engine.phase import trainable_parameters
from cascade_train.errors import ConfigError
from cascade_train.tasks.finetune import Finetune
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import CPU, TaskContract, attached, batch_for, component, left


class TestFinetune(TaskContract):
    option = "finetune"
    model = "c_tiny"


OBJECTIVES = {
    "c_tiny": ("constant", "debiased", "flow_matching", "gdf", "min_snr", "rectified_flow", "v", "x0"),
    "sd_tiny": ("ddpm_debiased", "ddpm_v"),
    "sdxl_tiny": ("edm_sdxl",),
}
"""Those that keep nothing between steps, so that a run continues with them as with any other: test_resume.py."""


@pytest.mark.parametrize("model", OBJECTIVES)
def test_objectives_keep_nothing_and_do_not_depend_on_how_a_batch_is_divided(model: str) -> None:
    stage = attached(component("task", "finetune"), model).stage
    for name in OBJECTIVES[model]:
        task = component("task", "finetune")
        task.attach(stage, component("objective", name), CPU)
        (phase,) = task.phases()
        batches = (batch_for(task, *ids) for ids in ((0, 1, 2, 3), (3, 1), (0, 2)))
        whole, *parts = (phase.loss(task.prepare_batch(batch)).loss_B.detach() for batch in batches)
        torch.testing.assert_close(whole[[3, 1, 0, 2]], torch.cat(parts), rtol=1e-4, atol=1e-6, msg=name)
        assert whole.unique().numel() == 4
        assert not task.state_dict(), name


def test_every_weight_of_the_network_trains_in_train_mode() -> None:
    stage, task = build_stage("c_tiny"), component("task", "finetune")
    assert isinstance(task, Finetune)
    stage.network.eval().requires_grad_(requires_grad=False)
    task.attach(stage, component("objective", "gdf"), torch.device("cpu"))
    assert all(parameter.requires_grad for parameter in task.stage.network.parameters())
    assert all(module.training for module in task.stage.network.modules())
    assert not any(m.training for frozen in task.stage.frozen_modules().values() for m in frozen.modules())


def test_the_prior_left_behind_conditions_and_predicts_as_the_stage_does(tmp_path: Path) -> None:
    task = attached(component("task", "finetune"), "c_tiny")
    pipeline = StableCascadePriorPipeline.from_pretrained(left(task, "prior", tmp_path))
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.config.resolution_multiple == 32.0

    text, pooled, _, _ = pipeline.encode_prompt("cpu", 1, 1, False, prompt=["a large green cross"])
    cond = task.stage.conditions(task.stage.tokenize(["a large green cross"]))
    torch.testing.assert_close(text, cond["clip_text"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pooled, cond["clip_text_pooled"], atol=1e-5, rtol=1e-4)

    noised, ratio = torch.randn(1, 16, 3, 3), torch.tensor([0.4])
    found = pipeline.prior(noised, ratio, **cond, return_dict=False)[0]
    torch.testing.assert_close(found, task.stage.network.eval()(noised, ratio, **cond, return_dict=False)[0])

    latent = pipeline("a red circle", height=96, width=96, num_inference_steps=2).image_embeddings
    assert latent.shape == (1, 16, 3, 3)


def test_a_network_whose_objective_diffusers_does_not_sample_is_left_alone(tmp_path: Path) -> None:
    for model, part, option in (("c_tiny", "prior", "finetune"), ("b_tiny", "decoder", "reconstruction")):
        task = attached(component("task", option), model, component("objective", "x0"))
        task.stage.stage_a = SimpleNamespace(in_pipelines=True)
        assert [path.name for path in left(task, part, tmp_path / part).glob("[!.]*")] == [part]


def test_bf16_towers_are_exported_in_the_networks_dtype(tmp_path: Path) -> None:
    stage = build_stage("c_tiny")
    stage.text_encoder.module.bfloat16()
    task = component("task", "finetune")
    task.attach(stage, component("objective", "gdf"), torch.device("cpu"))
    pipeline = StableCascadePriorPipeline.from_pretrained(left(task, "prior", tmp_path))
    assert pipeline.text_encoder.dtype == pipeline.prior.dtype == torch.float32
    assert stage.text_encoder.module.dtype == torch.bfloat16


def test_an_average_may_start_from_another_network(tmp_path: Path) -> None:
    task, other = (attached(component("task", "finetune"), "c_tiny") for _ in range(2))
    with torch.no_grad():
        for parameter in other.stage.network.parameters():
            parameter.add_(1.0)
    expected = {f"network.{name}": value.clone() for name, value in other.stage.network.state_dict().items()}
    save_file(other.stage.network.state_dict(), tmp_path / "ema.safetensors")
    found = dict(task.initial_average(str(tmp_path / "ema.safetensors")))
    assert {name for phase in task.phases() for name in trainable_parameters(phase)} <= found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_average_of_adapters_starts_from_what_trains() -> None:
    with pytest.raises(ConfigError, match="ema.weights=a: the average of a LoRA starts from the weights that train"):
        component("task", "lora").initial_average("a")
