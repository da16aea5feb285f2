"""A control network beside a frozen Stage C: what trains, the maps that it gets, and weights in and out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, ImageFilter
from cascade_train.models.cascade.networks.controlnet import ControlNetwork
from cascade_train.tasks.base import Guide
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import (
    CPU,
    TaskContract,
    attached,
    batch_for,
    component,
    left,
    make_batch,
    trainable,
)

SMALL = {"bottleneck": "small"}


class Mean(ImageFilter):
    """Three channels without any library: the picture itself, shifted by one number that is drawn."""

    channels = 3
    deterministic = False

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift = shift

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        drawn = float(torch.rand(1, generator=generator)) * self.shift
        return (image / 255 + drawn).astype(np.float32)


class Latent(ControlFilter):
    """A filter whose map is made on the device, of the stage's latents."""

    channels = 16

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        return lambda image_BCHW, made: encode(image_BCHW).detach()


class TestControlNet(TaskContract):
    option = "controlnet"
    model = "c_tiny"
    changes = SMALL


class TestControlNetUnderLatentsWithEveryMapDroppedNowAndThen(TestControlNet):
    @classmethod
    def make(cls) -> Any:
        return make(filter=Latent(), bottleneck="simple", control_drop_prob=0.5)


def make(filter: ControlFilter | None = None, **changes: Any) -> Any:  # noqa: A002 - the user's key
    """Return an attached task, with a filter of this file's own by default."""
    given = component("task", "controlnet", **SMALL | changes)
    given.filter = Mean() if filter is None else filter
    return attached(given, "c_tiny")


def audible(task: Any) -> Any:
    """Give the last layers values, as after some training."""
    for i, projection in enumerate(task.controlnet.projections):
        nn.init.normal_(projection[2].weight, std=0.1, generator=torch.Generator().manual_seed(i))
    return task


@pytest.fixture(scope="module")
def trained() -> Any:
    return audible(make())


def pictures(*values: float) -> Tensor:
    """Return pictures (B, 3, 96, 96) with a bright square, each of its own brightness."""
    image_BCHW = torch.full((len(values), 3, 96, 96), 0.2)
    for row, value in enumerate(values):
        image_BCHW[row, :, 30:60, 20:70] = value
    return image_BCHW


def prediction(task: Any, image_BCHW: Tensor | None, **more: Any) -> Tensor:
    """Return the conditional prediction on a fixed latent for one caption."""
    predict = task.predictor(["a red circle"], image_BCHW, **more)
    return predict(torch.ones(1, 16, 3, 3), torch.tensor([0.5]))[0]


def test_only_the_control_network_trains_and_the_generator_is_frozen_in_eval_mode(trained: Any) -> None:
    (phase,) = trained.phases()
    assert set(phase.modules) == {"network", "controlnet"}
    names = trainable(phase)
    assert names
    assert all(name.startswith("controlnet.") for name in names)
    assert len(names) == len(list(trained.controlnet.parameters()))
    assert not any(p.requires_grad for p in trained.stage.network.parameters())
    assert not any(module.training for module in trained.stage.network.modules())


def plain(stage: Any, task: Any) -> None:
    pass


def recomputed(stage: Any, task: Any) -> None:
    stage.network.gradient_checkpointing = True


def compiled(stage: Any, task: Any) -> None:
    for unit in [*stage.units(), *task.controlnet.units()]:
        for module in unit:
            module.compile(backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
@pytest.mark.parametrize("change", [plain, recomputed, compiled])
def test_at_step_zero_the_generators_output_is_bit_for_bit_its_own(change: Callable[[Any, Any], None]) -> None:
    task, alone = make(), attached(component("task", "finetune"), "c_tiny")
    for stage in (task.stage, alone.stage):
        spread(stage.network)
        change(stage, task)
    alone.stage.network.eval()
    prepared = task.prepare_batch(batch_for(task, 0, 1))
    expected = alone.prepare_batch(make_batch(0, 1))
    assert torch.equal(task.loss(prepared).loss_B, alone.loss(expected).loss_B)
    assert torch.equal(task.evaluate(prepared, 0.0), alone.evaluate(expected, 0.0))
    assert torch.equal(prediction(task, pictures(0.9)), prediction(alone, None))


def spread(network: nn.Module) -> None:
    """Give every weight a value, so that no zero of a first step hides what is added."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
@pytest.mark.parametrize("change", [plain, recomputed, compiled])
def test_gradients_reach_every_weight_and_none_of_a_bf16_generator(change: Callable[[Any, Any], None]) -> None:
    stage = build_stage("c_tiny", dtype=torch.bfloat16)
    spread(stage.network)
    task = component("task", "controlnet", **SMALL)
    task.filter = Mean()
    task.attach(stage, component("objective", "gdf"), CPU)
    change(stage, audible(task))
    task.loss(task.prepare_batch(batch_for(task, 0, 1))).loss_B.sum().backward()
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in stage.network.parameters())
    for name, parameter in task.controlnet.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.abs().sum() > 0, name


def test_a_picture_steers_losses_evaluation_and_samples(trained: Any) -> None:
    batch = batch_for(trained, 0, 1)
    other = replace(batch, tensors={name: 1 - value for name, value in batch.tensors.items()})
    one, two = (trained.prepare_batch(each) for each in (batch, other))
    assert not torch.allclose(trained.loss(one).loss_B, trained.loss(two).loss_B, rtol=1e-3)
    assert not torch.allclose(trained.evaluate(one, 0.0), trained.evaluate(two, 0.0), rtol=1e-3)
    assert not torch.allclose(prediction(trained, pictures(0.9)), prediction(trained, pictures(0.3)), rtol=1e-3)


def test_both_predictions_follow_the_map(trained: Any) -> None:
    cond, uncond = (trained.predictor(["a red circle"], pictures(v)) for v in (0.9, 0.3))
    inputs = torch.ones(1, 16, 3, 3), torch.tensor([0.5])
    for one, two in zip(cond(*inputs), uncond(*inputs), strict=True):
        assert not torch.allclose(one, two, rtol=1e-3)


def test_maps_are_dropped_in_training_alone() -> None:
    always, never = (audible(make(control_drop_prob=p)) for p in (1.0, 0.0))
    batch = batch_for(always, 0, 1)
    blank = replace(batch, tensors={name: torch.zeros_like(value) for name, value in batch.tensors.items()})
    dropped, whole, empty = (t.prepare_batch(b) for t, b in ((always, batch), (never, batch), (never, blank)))
    assert torch.equal(always.loss(dropped).loss_B, never.loss(empty).loss_B)
    assert not torch.equal(always.loss(dropped).loss_B, never.loss(whole).loss_B)
    assert torch.equal(always.evaluate(dropped, 0.0), never.evaluate(whole, 0.0))


def test_finished_maps_of_a_cache_stand_in_for_the_filters(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_for(trained, 0, 1)
    made = trained.prepare_batch(batch)
    cached = replace(batch, tensors={"control": made.control_BCHW})
    assert torch.equal(trained.loss(trained.prepare_batch(cached)).loss_B, trained.loss(made).loss_B)
    latents = {trained.stage.latent_name: trained.stage.encode(made.images)}
    without = replace(batch, image_BCHW=None, tensors=latents)
    monkeypatch.setattr(trained.stage, "left_out", frozenset({"semantic_compressor"}))
    monkeypatch.setattr(trained.stage, "reads_cache", True)
    with pytest.raises(ConfigError, match="the cache holds no control maps; make it with task=controlnet"):
        trained.prepare_batch(without)


def guide(image_BCHW: Tensor, *, is_map: bool = False, strength: float = 1.0, numbers: tuple[int, ...] = (0,)) -> Guide:
    pixels = (image_BCHW * 255).round().to(torch.uint8)
    return Guide(image_BCHW=pixels, is_map=is_map, strength=strength, numbers=numbers)


def guided(task: Any, given: Guide) -> Tensor:
    predict = task.guided_predictor(["a red circle"], given)
    return predict(torch.ones(1, 16, 3, 3), torch.tensor([0.5]))[0]


def test_a_users_picture_is_filtered_and_a_users_map_is_taken_as_it_is(trained: Any) -> None:
    expected = prediction(trained, pictures(0.8))
    torch.testing.assert_close(guided(trained, guide(pictures(0.8))), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(guided(trained, guide(pictures(0.8), is_map=True)), expected, rtol=1e-4, atol=1e-5)


def test_strength_scales_the_control_and_none_is_the_generator_alone(trained: Any) -> None:
    none, half, whole = (guided(trained, guide(pictures(0.9), strength=s)) for s in (0.0, 0.5, 1.0))
    alone = attached(component("task", "finetune"), "c_tiny")
    alone.stage.network.eval()
    assert torch.equal(none, prediction(alone, None))
    assert 0 < (half - none).norm() < (whole - none).norm()


def test_random_choices_about_a_users_picture_depend_on_its_number() -> None:
    task = audible(make(Mean(shift=1.0)))
    one, again, other = (guided(task, guide(pictures(0.9), numbers=(n,))) for n in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_grey_map_is_read_from_a_coloured_picture() -> None:
    task = audible(make(component("filter", "canny")))
    white = torch.zeros(1, 3, 96, 96)
    white[..., 40:44, :] = 1.0
    torch.testing.assert_close(
        guided(task, guide(white, is_map=True)), guided(task, guide(white[:, :1], is_map=True)), rtol=1e-4, atol=1e-5
    )


def test_maps_of_another_kind_and_no_picture_at_all_are_refused(trained: Any) -> None:
    with pytest.raises(ConfigError, match="control: a picture of 1 channels, the maps of Mean have 3; give image="):
        trained.guided_predictor(["a"], guide(torch.zeros(1, 1, 96, 96), is_map=True))
    with pytest.raises(ConfigError, match="a control network samples under an image; give image="):
        trained.predictor(["a"], None)
    other = attached(component("task", "lora"), "c_tiny")
    with pytest.raises(ConfigError, match="are for control networks; a LoRA samples from prompts alone"):
        other.guided_predictor(["a"], guide(pictures(0.5)))


def test_people_are_shown_the_maps(trained: Any) -> None:
    shown = trained.shown(pictures(0.9, 0.4))
    assert list(shown) == ["control"]
    torch.testing.assert_close(shown["control"], pictures(0.9, 0.4), rtol=0, atol=1e-2)
    assert attached(component("task", "lora"), "c_tiny").shown(pictures(0.5)) == {}


def test_what_a_run_leaves_says_what_it_is_and_trains_on(trained: Any, tmp_path: Path) -> None:
    run = str(left(trained, "controlnet", tmp_path / "export"))
    with safe_open(f"{run}/controlnet.safetensors", framework="pt") as file:
        header, names = file.metadata(), list(file.keys())
    assert (header["blocks"], header["bottleneck"], header["channels"]) == ("[0, 1, 6, 7]", "small", "3")
    assert "Mean" in header["filter"]
    assert set(names) == set(trained.controlnet.state_dict())
    again = make(weights=run, seed=7)
    assert torch.equal(prediction(again, pictures(0.9)), prediction(trained, pictures(0.9)))
    assert all(p.requires_grad for p in again.controlnet.parameters())
    fresh = make(seed=7)
    fresh.load_export(tmp_path / "export")
    assert torch.equal(prediction(fresh, pictures(0.9)), prediction(trained, pictures(0.9)))


def test_blocks_of_stored_weights_are_taken_over(tmp_path: Path) -> None:
    run = str(left(audible(make(blocks=[7, 2])), "controlnet", tmp_path))
    again = make(weights=run)
    assert again.controlnet.spec.blocks == (7, 2)
    with pytest.raises(ConfigError, match=r"control the blocks \[7, 2\], not task.blocks=\[0\]; leave"):
        make(weights=run, blocks=[0])


def test_a_filter_without_channels_is_refused_by_name() -> None:
    class Unfinished(ControlFilter):
        def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
            raise AssertionError("is refused before")

    task = component("task", "controlnet")
    task.filter = Unfinished()
    with pytest.raises(ConfigError, match="task.filter: Unfinished has no `channels`"):
        task.check_stage(build_stage("c_tiny"))


def test_another_filter_is_told(trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = str(left(trained, "controlnet", tmp_path))
    with caplog.at_level(logging.WARNING):
        make(weights=run)
        assert not caplog.text
        make(Mean(shift=0.5), weights=run)
    assert "was trained on maps of" in caplog.text


def test_weights_that_do_not_fit_are_refused(trained: Any, tmp_path: Path) -> None:
    run = str(left(trained, "controlnet", tmp_path))
    with pytest.raises(ConfigError, match=r"maps of 3 channels, which .*Mean made, task.filter makes 16; choose its"):
        make(Latent(), weights=run)
    with pytest.raises(ConfigError, match="this control network has task.bottleneck=small; set it so"):
        make(weights=run, bottleneck="simple")
    deep = {"down_num_layers_per_block": [2, 2], "up_num_layers_per_block": [2, 2], "block_out_channels": [64, 64]}
    other = component("task", "controlnet", **SMALL, weights=run)
    other.filter = Mean()
    with pytest.raises(ConfigError, match=r"is for blocks \[0, 1, 6, 7\] of width 128, the model has 8 of width 64"):
        other.attach(build_stage("c_tiny", {"weights": None, "network": deep}), component("objective", "gdf"), CPU)


@pytest.mark.parametrize("block", [8, -1])
def test_blocks_that_the_model_lacks_are_refused(block: int) -> None:
    with pytest.raises(ConfigError, match=rf"task.blocks=\[0, {block}\]: this model executes 8 .* and {block} is"):
        make(blocks=[0, block])


def bare(task: Any, folder: Path) -> str:
    """Write a control network as the original does, without a header; return the file."""
    save_file(task.controlnet.state_dict(), folder / "canny.safetensors")
    return str(folder / "canny.safetensors")


def test_a_bare_file_is_asked_about_and_its_filter_is_doubted(
    trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = bare(trained, tmp_path)
    with pytest.raises(ConfigError, match=r"4 projections of task.bottleneck=small for maps of 3 channels"):
        make(weights=path)
    with pytest.raises(ConfigError, match=r"task.weights=.* with the blocks \[0, 1, 6, 9\]: this model .* 9 is"):
        make(weights=path, blocks=[0, 1, 6, 9])
    with pytest.raises(ConfigError, match=r"takes maps of 3 channels, task.filter makes 16; choose its filter"):
        make(Latent(), weights=path, blocks=[0, 1, 6, 7])
    with caplog.at_level(logging.WARNING):
        again = make(weights=path, blocks=[0, 1, 6, 7])
    assert "does not say what made its maps, and is now given" in caplog.text
    assert torch.equal(prediction(again, pictures(0.9)), prediction(trained, pictures(0.9)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, r"blocks=\[\]: names no block, or one twice"),
        ({"blocks": [1, 1]}, r"blocks=\[1, 1\]: names no block, or one twice"),
        ({"control_drop_prob": 1.5}, "control_drop_prob=1.5 must lie in"),
        ({"bottleneck": "small", "backbone_weights": "imagenet"}, "are for bottleneck=effnet, not small"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        component("task", "controlnet", **changes)


def test_an_efficientnet_takes_its_trained_values(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "cascade_train.models.cascade.control.load_features", lambda _, source, key: asked.append((source, key))
    )
    task = make(bottleneck="effnet", backbone_weights="imagenet")
    assert asked == [("imagenet", "task.backbone_weights")]
    assert isinstance(task.controlnet, ControlNetwork)
    assert task.controlnet.spec.bottleneck == "effnet"
