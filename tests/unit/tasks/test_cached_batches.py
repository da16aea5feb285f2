"""Batches from a cache: the same conditions and latents, and only where somebody compared cache and model."""

from dataclasses import replace

import pytest
import torch

from cascade_train.errors import ConfigError
from tests.unit.models.cascade.test_stage_c import TINY_VISION
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import CPU, component, make_batch


@pytest.fixture(scope="module")
def stage():
    return build_stage("c_tiny", {"image_encoder": TINY_VISION})


@pytest.fixture
def task(stage):
    task = component("task", "finetune", image_keep_prob=0.5)
    task.attach(stage, component("objective", "gdf"), CPU)
    return task


def cached(stage, batch):
    products = stage.make_image_products(batch.image_BCHW.float() / 255)
    return replace(batch, image_BCHW=None, tensors=products)


def test_products_stand_for_images_and_captions(stage, monkeypatch):
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


def test_a_batch_of_products_is_prepared_as_one_of_images(stage, task, monkeypatch):
    batch = make_batch(0, 1)
    expected = task.prepare_batch(batch)
    monkeypatch.setattr(stage, "left_out", frozenset({"semantic_compressor"}))
    monkeypatch.setattr(stage, "reads_cache", True)
    found = task.prepare_batch(cached(stage, batch))
    assert found.image_BCHW is None
    assert torch.equal(found.noise_BCHW, expected.noise_BCHW)
    torch.testing.assert_close(task.loss(found).loss_B, task.loss(expected).loss_B, rtol=1e-5, atol=1e-6)


def test_products_that_nobody_compared_with_the_model_are_refused(stage, task):
    with pytest.raises(ConfigError, match="a cache cannot be a part of other data"):
        task.prepare_batch(cached(stage, make_batch(0)))
