"""Which conditions and which noise a captioned image trains with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cascade_train.batch import Batch
from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Task
from cascade_train.tasks.finetune import Finetune
from tests.unit.models.cascade.test_stage_c import TINY_VISION
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import CPU, attached, component, make_batch


@pytest.fixture(scope="module")
def task() -> Any:
    return attached(component("task", "finetune"), "c_tiny")


@pytest.fixture
def asked(task: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collects the arguments of every call of `conditions`."""
    calls, conditions = [], task.stage.conditions

    def record(*args: Any) -> Any:
        calls.append(args)
        return conditions(*args)

    monkeypatch.setattr(task.stage, "conditions", record)
    return calls


def many(count: int = 2000) -> Batch:
    batch = make_batch(0, side=32)
    return Batch(
        image_BCHW=batch.image_BCHW.expand(count, -1, -1, -1),
        captions=("a circle",) * count,
        keys=("sample",) * count,
        epoch_B=torch.zeros(count, dtype=torch.int64),
        index_B=torch.arange(count),
        seed=5,
    )


def test_the_shares_of_dropped_captions_and_kept_images_are_as_given(task: Any) -> None:
    prepared = task.prepare_batch(many())
    assert prepared.drop_caption_B.float().mean() == pytest.approx(0.05, abs=0.015)
    assert prepared.keep_image_B.float().mean() == pytest.approx(0.10, abs=0.02)
    both = (prepared.drop_caption_B & prepared.keep_image_B).float().mean()
    assert both == pytest.approx(0.005, abs=0.005)


def test_draws_are_uniform_and_normal_in_the_latents_shape(task: Any) -> None:
    prepared = task.prepare_batch(many())
    assert prepared.image_BCHW.dtype == torch.uint8
    assert prepared.timestep_B.mean() == pytest.approx(0.5, abs=0.02)
    assert prepared.noise_BCHW.shape == (2000, 16, 1, 1)
    assert prepared.noise_BCHW.std() == pytest.approx(1.0, abs=0.02)
    assert prepared.offset_BC11 is None


def test_a_dropped_caption_is_the_empty_one_and_the_others_stay(task: Any, asked: list[tuple[Any, ...]]) -> None:
    batch = make_batch(0, 1, captions=("a red circle", "a blue square"))
    prepared = task.prepare_batch(batch)
    prepared.drop_caption_B.copy_(torch.tensor([True, False]))
    task.loss(prepared)
    expected = task.stage.tokenize(["", "a blue square"])
    assert all(torch.equal(asked[0][0][name], value) for name, value in expected.items())
    whole = task.stage.tokenize(["a red circle", "a blue square"])
    task.evaluate(prepared, 0.0)
    assert all(torch.equal(asked[1][0][name], value) for name, value in whole.items())


def test_images_are_conditions_in_training_alone(task: Any, asked: list[tuple[Any, ...]]) -> None:
    prepared = task.prepare_batch(make_batch(0, 1))
    task.loss(prepared)
    _, image, keep, drawn = asked[0]
    assert drawn is None
    assert image.dtype == torch.float32
    assert torch.equal(image, prepared.image_BCHW / 255)
    assert torch.equal(keep, prepared.keep_image_B)
    task.evaluate(prepared, 0.0)
    assert asked[1][1] is None


def test_without_kept_images_none_are_encoded(
    task: Any, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "_image_keep_prob", 0.0)
    task.loss(task.prepare_batch(make_batch(0)))
    assert asked[0][1] is None


def test_a_predictor_gives_the_captions_prediction_first(task: Any) -> None:
    noised, ratio = torch.randn(1, 16, 3, 3), torch.tensor([0.5])
    found = task.predictor(["a blue square"], None)(noised, ratio)
    for caption, pred in zip(("a blue square", ""), found, strict=True):
        cond = task.stage.conditions(task.stage.tokenize([caption]))
        torch.testing.assert_close(pred, task.stage.predict(noised, ratio, cond), rtol=1e-4, atol=1e-5)


def test_the_report_holds_what_the_objective_learns_from(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    output = task.loss(task.prepare_batch(make_batch(0, 1)))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(task.objective, "after_step", lambda *values: seen.extend(values))
    task.after_step(output.report)
    assert seen[0] is output.report["logsnr"]
    assert seen[1] is output.report["loss_raw"]
    weight_B = task.objective.loss_weight(output.report["logsnr"])
    torch.testing.assert_close(output.loss_B, weight_B * output.report["loss_raw"])


def test_a_report_that_the_objective_cannot_learn_from_is_refused_by_name(task: Any) -> None:
    with pytest.raises(ConfigError, match=r"Finetune.loss reports no logsnr and no loss_raw, to which the objective"):
        task.after_step({"loss": torch.zeros(2)})


def test_a_samples_weight_multiplies_its_loss_alone(task: Any) -> None:
    plain = task.loss(task.prepare_batch(make_batch(0, 1)))
    weighted = task.loss(task.prepare_batch(replace(make_batch(0, 1), weight_B=torch.tensor([1.0, 0.25]))))
    assert torch.equal(weighted.loss_B, plain.loss_B * torch.tensor([1.0, 0.25]))
    assert torch.equal(weighted.report["loss_raw"], plain.report["loss_raw"])


def test_adaptive_weights_are_the_tasks_state() -> None:
    task: Task = attached(component("task", "finetune"), "c_tiny", component("objective", "adaptive"))
    before = {name: value.clone() for name, value in task.state_dict().items()}
    assert before
    output = task.phases()[0].loss(task.prepare_batch(make_batch(0, 1)))
    task.after_step(output.report)
    after = task.state_dict()
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    task.load_state_dict(before)
    assert all(torch.equal(task.state_dict()[name], value) for name, value in before.items())


def test_offset_noise_is_drawn_where_the_objective_has_it() -> None:
    plain = attached(component("task", "finetune"), "c_tiny")
    offset = attached(component("task", "finetune"), "c_tiny", component("objective", "gdf", offset_noise=0.5))
    prepared = offset.prepare_batch(make_batch(0, 1))
    assert prepared.offset_BC11.shape == (2, 16, 1, 1)
    losses = [task.phases()[0].loss(task.prepare_batch(make_batch(0, 1))).loss_B for task in (plain, offset)]
    assert not torch.allclose(*losses)


@pytest.mark.parametrize(("key", "value"), [("cond_drop_prob", -0.1), ("image_keep_prob", 1.1)])
def test_a_share_outside_zero_and_one_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key}={value} must lie between 0 and 1"):
        Finetune(**({"cond_drop_prob": 0.1, "image_keep_prob": 0.1} | {key: value}))


def masked(task: Any, mask: torch.Tensor) -> Any:
    """Return a prepared batch of two samples with a mask, (2, 1, 96, 96) uint8."""
    batch = make_batch(0, 1, captions=("a red circle", "a blue square"))
    side = batch.image_BCHW.shape[-1]
    return task.prepare_batch(replace(batch, tensors={"mask": mask[:, :, :side, :side]}))


def test_a_full_mask_changes_no_loss_and_an_empty_one_leaves_none(task: Any) -> None:
    task.stage.network.eval()
    plain = task.prepare_batch(make_batch(0, 1, captions=("a red circle", "a blue square")))
    mask = torch.zeros(2, 1, 96, 96, dtype=torch.uint8)
    mask[0] = 255
    prepared = masked(task, mask)
    assert prepared.mask_B1HW.shape == (2, 1, *prepared.noise_BCHW.shape[2:])
    (full, none), (loss, _) = task.loss(prepared).loss_B.detach(), task.loss(plain).loss_B.detach()
    assert float(full) == pytest.approx(float(loss), rel=1e-5)
    assert float(none) == 0.0
    assert float(task.evaluate(prepared, 0.0)[1]) == 0.0


def test_a_mask_keeps_the_loss_to_its_places(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the picture counts: what is predicted in the other half makes no difference."""
    mask = torch.zeros(2, 1, 96, 96, dtype=torch.uint8)
    batch = make_batch(0, 1, captions=("a red circle", "a blue square"))
    side = batch.image_BCHW.shape[-1]
    mask[..., : side // 2] = 255
    prepared = masked(task, mask)
    width = prepared.noise_BCHW.shape[-1]
    shown = prepared.mask_B1HW[0, 0].mean(dim=0)
    assert shown[0] == 1.0
    assert shown[-1] == 0.0
    losses = []
    for value in (0.0, 100.0):

        def predict(noised: torch.Tensor, *_: Any, value: float = value) -> torch.Tensor:
            pred = torch.zeros_like(noised)
            pred[..., -(width // 2) :] = value
            return pred

        monkeypatch.setattr(task.stage, "predict", predict)
        losses.append(task.loss(prepared).loss_B)
    assert torch.equal(losses[0], losses[1])
    assert (losses[0] > 0).all()


@pytest.fixture(scope="module")
def stage() -> Any:
    return build_stage("c_tiny", {"image_encoder": TINY_VISION})


@pytest.fixture
def of_cache(stage: Any) -> Any:
    task = component("task", "finetune", image_keep_prob=0.5)
    task.attach(stage, component("objective", "gdf"), CPU)
    return task


def cached(stage: Any, batch: Batch) -> Batch:
    products = stage.make_image_products(batch.image_BCHW.float() / 255)
    return replace(batch, image_BCHW=None, tensors=products)


def test_products_stand_for_images_and_captions(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images, captions, keep = torch.rand(2, 3, 96, 128), ["a small red circle", ""], torch.tensor([True, False])
    products = stage.make_image_products(images)
    assert products.keys() == stage.image_products.keys() == {"effnet_latent", "clip_img"}
    expected = stage.conditions(stage.tokenize(captions), images, keep)
    latents, of_captions = stage.encode(images), stage.make_caption_products(captions)
    assert of_captions.keys() == stage.caption_products.keys()
    monkeypatch.setattr(stage, "caption_lookup", lambda _: of_captions)
    monkeypatch.setattr(stage, "left_out", frozenset({"text_encoder", "image_encoder", "semantic_compressor"}))
    monkeypatch.setattr(stage, "reads_cache", True)
    assert stage.frozen_modules().keys() == {"previewer"}
    assert torch.equal(stage.encode(products), latents)
    found = stage.conditions(stage.tokenize(captions), products, keep)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the tower sees the kept rows alone
    assert found["clip_img"][0].any()


def test_a_batch_of_products_is_prepared_as_one_of_images(
    stage: Any, of_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(0, 1)
    expected = of_cache.prepare_batch(batch)
    monkeypatch.setattr(stage, "left_out", frozenset({"semantic_compressor"}))
    monkeypatch.setattr(stage, "reads_cache", True)
    found = of_cache.prepare_batch(cached(stage, batch))
    assert found.image_BCHW is None
    assert torch.equal(found.noise_BCHW, expected.noise_BCHW)
    torch.testing.assert_close(of_cache.loss(found).loss_B, of_cache.loss(expected).loss_B, rtol=1e-5, atol=1e-6)


def test_products_that_nobody_compared_with_the_model_are_refused(stage: Any, of_cache: Any) -> None:
    with pytest.raises(ConfigError, match="a cache cannot be a part of other data"):
        of_cache.prepare_batch(cached(stage, make_batch(0)))
