"""A family that diffuses by flow matching is one folder and one YAML, laid over the package: no file of it changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

import cascade_train.models
from cascade_train.__main__ import launch
from cascade_train.diffusion.sampler import sample
from cascade_train.distributed.process_group import process_group
from cascade_train.results.find import find_model
from cascade_train.results.sampling import load_parts
from tests.integration.runs import cut_back, read_metrics
from tests.unit.models import stages
from tests.unit.models.stage_contract import StageContract

MEMBERS = Path(__file__).parent / "members"
FAMILY = "cascade_train.models.rectified_flow"
CONF = ("--config-dir", str(MEMBERS / "conf"))
FLOW = ("model=flow_tiny", "data.num_workers=0", "train.global_batch_size=4", "train.max_steps=2")
PICTURES = ("data=shapes", "data.samples=12")
QUIET = ("sample.every_steps=null", "checkpoint.every_steps=1", "checkpoint.keep_last=3", "optimizer.lr=1e-3")
TRANSFORMER = Path("export/pipeline/transformer/diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    """Lay the members' folder of models over the package's."""
    folder = str(MEMBERS / "cascade_train" / "models")
    cascade_train.models.__path__.append(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "CONF", MEMBERS / "conf")
        yield
    cascade_train.models.__path__.remove(folder)
    for name in [name for name in sys.modules if name.startswith(FAMILY)]:
        del sys.modules[name]


def train(run: Path, *overrides: str) -> Path:
    data = () if "data=cached" in overrides else PICTURES
    assert launch([*CONF, *FLOW, *data, *QUIET, f"run.dir={run}", *overrides]) == 0
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shown = ("sample.every_steps=2", "sample.steps=2", "sample.count=2", "sample.sampler=ddim")
    return train(tmp_path_factory.mktemp("flow") / "run", "task=finetune", *shown)


class TestFlow(StageContract):
    model = "flow_tiny"

    def test_latents_are_shifted_and_scaled_and_come_back(self, stage: Any) -> None:
        image = torch.rand(1, 3, 32, 32)
        plain = stage.vae.module.encode(2 * image - 1).latent_dist.mean
        latent = stage.encode(image)
        torch.testing.assert_close(latent, 1.5 * (plain - 0.1))
        shown = (stage.vae.module.decode(plain).sample + 1) / 2
        torch.testing.assert_close(stage.vae.decode(latent), shown)
        assert {"quant_conv.weight", "post_quant_conv.weight"}.isdisjoint(stage.vae.module.state_dict())


def test_it_trains_samples_and_resumes_to_the_bit(run: Path, tmp_path: Path) -> None:
    assert all(row["grad_norm"] > 0 for row in read_metrics(run))
    assert (run / "samples" / "step_2" / "grid.png").is_file()
    again = train(cut_back(run, tmp_path / "again", 1), "task=finetune")
    assert [row["loss"] for row in read_metrics(again)] == [row["loss"] for row in read_metrics(run)]
    first, second = (load_file(each / TRANSFORMER) for each in (run, again))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_diffusers_paints_our_pictures_from_its_pipeline(run: Path) -> None:
    card = (run / "export" / "README.md").read_text()
    assert "StableDiffusion3Pipeline.from_pretrained" in card
    assert "rectified-flow" in card
    noise, steps = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0)), 4
    with process_group() as world:
        parts = load_parts(find_model(str(run), key="from", part=None), world)
    latents = sample(
        parts.task.predictor(["a red circle"], None),
        objective=parts.task.objective,
        noise=lambda: noise,
        steps=steps,
        guidance_scale=3.0,
        guidance_rescale=0.0,
        sampler="ddim",
    )
    pipeline = StableDiffusion3Pipeline.from_pretrained(run / "export" / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    asked = {"height": 32, "width": 48, "guidance_scale": 3.0, "max_sequence_length": 24, "output_type": "pt"}
    sigmas = torch.linspace(1, 0, steps + 1)[:-1].tolist()
    theirs = pipeline("a red circle", latents=noise, num_inference_steps=steps, sigmas=sigmas, **asked).images
    ours = parts.stage.decode(latents)
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0.0)


def test_adapters_train_on_it_and_diffusers_loads_them(run: Path, tmp_path: Path) -> None:
    lora = train(tmp_path / "lora", "task=lora", f"model.weights={run}", "task.text_encoder_filters=[.self_attn]")
    assert all(row["grad_norm"] > 0 for row in read_metrics(lora))
    assert launch(["generate", f"from={lora}", "prompts=[a red circle]", "steps=2", f"out={tmp_path / 'out'}"]) == 0
    assert launch(["merge", f"from={run}", f"lora={lora}", f"out={tmp_path / 'merged'}"]) == 0
    base, merged = load_file(run / TRANSFORMER), load_file(tmp_path / "merged" / TRANSFORMER.name)
    moved = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    pipeline = StableDiffusion3Pipeline.from_pretrained(run / "export" / "pipeline")
    pipeline.load_lora_weights(lora / "export" / "lora")
    pipeline.fuse_lora(components=["transformer"])
    fused = pipeline.transformer.state_dict()
    assert len(moved) > 10
    for name in moved:
        torch.testing.assert_close(fused[name.replace(".weight", ".base_layer.weight")], merged[name])


def test_it_is_planned_and_trains_from_a_cache(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["plan", *CONF, *FLOW, "task=finetune"]) == 0
    said = capsys.readouterr().out
    assert "Finetune of FlowStage, 32 px" in said
    stored = load_file(run / TRANSFORMER)
    parameters = sum(value.numel() for name, value in stored.items() if name != "pos_embed.pos_embed")
    assert f"{parameters:,}" in said
    cache = tmp_path / "cache"
    assert launch(["cache", *CONF, *FLOW, *PICTURES, "task=finetune", f"out={cache}"]) == 0
    cached = train(tmp_path / "cached", "task=finetune", "data=cached", f"data.path={cache}")
    losses = [row["loss"] for row in read_metrics(run)]
    assert [row["loss"] for row in read_metrics(cached)] == pytest.approx(losses, rel=1e-4)


def test_objectives_of_other_noise_levels_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*CONF, *FLOW, "task=finetune", "objective=ddpm", f"run.dir={tmp_path / 'run'}"]
    assert launch(asked) == 2
    assert "made for a flow_timestep" in capsys.readouterr().err


def test_weights_of_an_autoencoder_with_another_shift_are_warned_of(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"weights": str(run / "export" / "pipeline"), "shift_factor": None}
    stages.build_stage("flow_tiny", {"vae": weights})
    assert "was made for model.vae.shift_factor=0.1, and 0 counts here" in caplog.text
