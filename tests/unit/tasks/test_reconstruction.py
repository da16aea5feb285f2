"""Training of Stage B: every weight of its network, and a decoder that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from diffusers import StableCascadeDecoderPipeline

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.latent_codec import VQGAN
from cascade_train.models.formats.export import build_plain_network
from cascade_train.models.formats.weights import load_state
from cascade_train.models.initialize import Fill, fill_
from cascade_train.tasks.base import Guide
from cascade_train.tasks.reconstruction import Reconstruction
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import TaskContract, attached, component, left, make_batch

UNTRAINED = {"_target_": "cascade_train.models.cascade.convolutional.ConvolutionalCompressor", "weights": None}
SMALL_VQGAN = {"bottleneck_blocks": 1, "embed_dim": 16, "latent_channels": 4, "num_vq_embeddings": 32, "levels": 2}


class TestReconstruction(TaskContract):
    option = "reconstruction"
    model = "b_tiny"


class TestReconstructionWithItsCompressor(TaskContract):
    option = "reconstruction"
    changes: ClassVar = {"train_compressor": True}
    model = "b_tiny"

    @classmethod
    def make(cls) -> Any:
        stage = build_stage(cls.model, {"semantic_compressor": UNTRAINED})
        for name, parameter in stage.network.named_parameters():
            fill_(parameter, Fill(kind="normal", scale=0.1), 0, name)
        task = component("task", cls.option, **cls.changes)
        task.attach(stage, component("objective", "gdf"), torch.device("cpu"))
        return task

    def test_the_compressor_moves_with_the_decoder_and_is_left_beside_it(self, prepared: Any, tmp_path: Path) -> None:
        task = self.make()
        module = task.stage.semantic_compressor.module
        task.phases()[0].loss(prepared).loss_B.mean().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        for name in task.exports():
            left(task, name, tmp_path / "export")
        fresh = self.make()
        assert not all(map(torch.equal, fresh.stage.semantic_compressor.module.parameters(), module.parameters()))
        fresh.load_export(tmp_path / "export")
        assert all(map(torch.equal, fresh.stage.semantic_compressor.module.parameters(), module.parameters()))
        again = ConvolutionalCompressor(weights=str(tmp_path))
        again.build(device=torch.device("cpu"))
        assert all(map(torch.equal, again.module.parameters(), module.parameters()))

    def test_no_average_of_a_compressor_can_be_given(self, task: Any) -> None:
        with pytest.raises(ConfigError, match="holds no average of a compressor that trains along"):
            task.initial_average("runs/other")

    def test_a_cache_would_hold_what_it_made_at_first(self, task: Any) -> None:
        assert task.trained_parts() == {"semantic_compressor"}


class TestLoraOfStageB(TaskContract):
    option = "lora"
    model = "b_tiny"
    lr = 1.0


@pytest.fixture(scope="module")
def task() -> Any:
    return attached(component("task", "reconstruction"), "b_tiny")


def test_nine_of_ten_samples_keep_their_semantic_latents(task: Any) -> None:
    kept = task.prepare_batch(make_batch(*range(300), side=32)).keep_image_B.float().mean()
    assert 0.84 < kept < 0.95


def test_evaluation_shows_the_whole_image(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    of_stage = task.stage.conditions
    monkeypatch.setattr(task.stage, "conditions", lambda *given: asked.append(given) or of_stage(*given))
    prepared = task.prepare_batch(make_batch(0, 1))
    task.evaluate(prepared, 0.0)
    assert torch.equal(asked[0][1], prepared.image_BCHW / 255)
    assert len(asked[0]) == 2


def test_a_prediction_without_conditions_has_neither_caption_nor_image(task: Any) -> None:
    image, noised, ratio = torch.rand(1, 3, 96, 96), torch.randn(1, 4, 24, 24), torch.tensor([0.5])
    shown, bare = task.predictor(["a blue square"], image)(noised, ratio)
    tokens = [task.stage.tokenize([caption]) for caption in ("a blue square", "")]
    conds = [task.stage.conditions(tokens[0], image), task.stage.conditions(tokens[1])]
    for pred, cond in zip((shown, bare), conds, strict=True):
        torch.testing.assert_close(pred, task.stage.predict(noised, ratio, cond), rtol=1e-4, atol=1e-5)


def test_it_cannot_paint_without_an_image(task: Any) -> None:
    with pytest.raises(ConfigError, match="stage_b reconstructs images and cannot sample from prompts alone"):
        task.predictor(["a blue square"], None)
    with pytest.raises(ConfigError, match="give image=<picture>, or from=<run of Stage C> decoder=<this one>"):
        task.guided_predictor(["a blue square"], Guide())


def test_the_decoder_left_behind_is_found_again_as_weights(task: Any, tmp_path: Path) -> None:
    left(task, "decoder", tmp_path / "export")
    network = task.stage.network_config.build()
    load_state(network, str(tmp_path), dtype=torch.float32, part="decoder")
    assert all(map(torch.equal, task.stage.network.state_dict().values(), network.state_dict().values()))
    read = dict(task.initial_average(str(tmp_path)))
    assert read.keys() == {f"network.{name}" for name in network.state_dict()}


def test_with_a_vqgan_the_folder_is_a_decoder_pipeline(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_a = VQGAN(weights=None, scale_factor=0.43, **SMALL_VQGAN)
    stage_a.build(device=torch.device("cpu"))
    monkeypatch.setattr(task.stage, "stage_a", stage_a)
    task.stage.exports()["decoder"](task.stage.network.state_dict(), tmp_path / "decoder")
    pipeline = StableCascadeDecoderPipeline.from_pretrained(tmp_path / "decoder")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.vqgan.config.scale_factor == 0.43
    assert pipeline.config.latent_dim_scale == 8.0
    image = torch.rand(1, 3, 96, 96)
    latents = task.stage.semantic_compressor.encode(image)
    painted = pipeline(latents, "a circle", num_inference_steps=2, output_type="pt").images
    assert painted.shape == image.shape
    plain = build_plain_network(CASCADE, task.stage.network.config, task.stage.network.state_dict())
    noised, ratio = torch.randn(1, 4, 24, 24), torch.tensor([0.5])
    cond = task.stage.conditions(task.stage.tokenize(["a circle"]), image)
    expected = plain(noised, ratio, **cond, return_dict=False)[0]
    torch.testing.assert_close(pipeline.decoder(noised, ratio, **cond, return_dict=False)[0], expected)


def test_a_stage_of_another_family_writes_its_own_network(tmp_path: Path) -> None:
    task, network, written = component("task", "reconstruction"), torch.nn.Linear(1, 1), []
    assert isinstance(task, Reconstruction)
    exports = {"weights": lambda *given: written.append(given)}
    task.stage = SimpleNamespace(network=network, exports=lambda: exports, text_encoders=dict)
    (export,) = task.exports().values()
    assert (export.module, export.whole, list(task.exports())) == (network, True, ["weights"])
    export.write({}, tmp_path)
    assert written == [({}, tmp_path)]


def test_a_stage_that_a_task_is_not_for_is_not_attached() -> None:
    task = component("task", "finetune")
    with pytest.raises(AssertionError, match="a Finetune is for text_to_image, not for stage_x"):
        task.attach(SimpleNamespace(name="stage_x", abilities=()), None, torch.device("cpu"))
