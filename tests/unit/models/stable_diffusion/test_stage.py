"""Stable Diffusion's stages: the contract at tiny sizes, and what is theirs alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cascade_train.models.stable_diffusion.stage import size_ids
from cascade_train.models.stage import Stage
from tests.unit.models.stage_contract import StageContract
from tests.unit.models.stages import build_stage, make_stage
from tests.unit.tasks.task_contract import make_batch


class TestSdTiny(StageContract):
    model = "sd_tiny"

    def test_every_block_is_a_unit(self, stage: Stage) -> None:
        inside = {type(module).__name__ for unit in stage.units() for module in unit}
        assert inside == {"ResnetBlock2D", "BasicTransformerBlock", "Downsample2D", "Upsample2D"}
        left = sum(p.numel() for p in stage.network.parameters()) - sum(
            p.numel() for unit in stage.units() for module in unit for p in module.parameters()
        )
        assert left < 0.25 * sum(p.numel() for p in stage.network.parameters())


class TestSdxlTiny(StageContract):
    model = "sdxl_tiny"

    def test_pictures_of_known_size_say_so_and_others_are_whole(self, stage: Stage) -> None:
        batch = replace(
            make_batch(0, 1, side=32),
            original_size_B2=torch.tensor([[64, 48], [40, 100]]),
            crop_B4=torch.tensor([[16, 0, 48, 48], [0, 30, 40, 40]]),
        )
        assert size_ids(batch).tolist() == [[64, 48, 11, 0, 32, 32], [40, 100, 0, 24, 32, 32]]
        aside = replace(batch, crop_B4=torch.tensor([[16, 0, 48, 48], [0, 10, 40, 40]]))
        mirrored = size_ids(replace(aside, flipped_B=torch.tensor([True, True])))
        assert mirrored.tolist() == [[64, 48, 11, 0, 32, 32], [40, 100, 0, 40, 32, 32]]
        assert torch.equal(size_ids(replace(aside, flipped_B=torch.tensor([False, False]))), size_ids(aside))
        tokens, latents = stage.tokenize(["a red circle"] * 2), torch.randn(2, 4, 8, 8)
        drawn = stage.draw(batch)
        framed = stage.conditions(tokens, drawn=drawn)
        whole = stage.conditions(tokens)
        assert framed["time_ids"].shape == (2, 6)
        assert "time_ids" not in whole
        assert "time_ids" not in stage.draw(make_batch(0, 1, side=32)), "of pictures of unknown size"
        timesteps = torch.tensor([10.0, 500.0])
        one, other = (stage.predict(latents, timesteps, cond) for cond in (framed, whole))
        assert (one - other).abs().max() > 1e-3
        sides = torch.tensor([[32.0, 32.0, 0.0, 0.0, 32.0, 32.0]]).expand(2, 6)
        assert torch.equal(other, stage.predict(latents, timesteps, {**whole, "time_ids": sides}))

    def test_a_cache_holds_latents_and_of_pictures_that_are_parts_their_sizes(self, stage: Stage) -> None:
        sizes = {"original_size_B2": torch.tensor([[64, 48]] * 2), "crop_B4": torch.tensor([[11, 0, 32, 32]] * 2)}
        batch = replace(make_batch(0, 1, side=32), **sizes)
        facts = stage.picture_facts(batch)
        assert facts.keys() == stage.needed_facts.keys() == {"time_ids"}
        from_cache = replace(batch, image_BCHW=None, tensors={**facts, "latent": torch.zeros(2, 4, 8, 8)})
        assert torch.equal(stage.draw(from_cache)["time_ids"], size_ids(batch))
        cached = build_stage("sdxl_tiny", {"size_conditions": "target"})
        assert not cached.needed_facts.keys() | cached.picture_facts(batch).keys()
        images = torch.rand(2, 3, 32, 32)
        products = cached.make_image_products(images)
        assert products.keys() == cached.image_products.keys() == {"latent", "latent_std"}
        drawn = cached.draw(make_batch(0, 1, side=32))
        assert drawn.keys() == {"posterior"}
        assert torch.equal(cached.training_latents(images, drawn), cached.training_latents(products, drawn))
        captions = cached.make_caption_products(["a red circle"])
        assert {name: tuple(value.shape) for name, value in captions.items()} == {
            "text": (1, 24, 32),
            "text_2": (1, 24, 48),
            "pooled": (1, 40),
        }


def test_latents_are_drawn_from_their_distribution_or_are_its_mean(sd: Stage) -> None:
    images = torch.rand(2, 3, 32, 32)
    mean, std = sd.vae.posterior(images)
    drawn = sd.draw(make_batch(0, 1, side=32))
    torch.testing.assert_close(sd.training_latents(images, drawn), mean + std * drawn["posterior"])
    assert torch.equal(sd.encode(images), mean)
    mean_alone = make_stage("sd_tiny", {"vae": {"sample_posterior": False}})
    assert mean_alone.draw(make_batch(0, 1, side=32)) == {}
    assert mean_alone.image_products == {"latent": "vae"}


@pytest.fixture(scope="module")
def sd() -> Any:
    return build_stage("sd_tiny")


def test_the_text_is_the_chosen_layers_with_or_without_the_last_norm(sd: Stage) -> None:
    tokens = sd.tokenize(["a small red circle", ""])
    module = sd.text_encoder.module
    ids = tokens["input_ids"]
    plain = type(module)(module.config)
    plain.load_state_dict(module.state_dict())
    found = plain.eval()(ids, output_hidden_states=True)
    for layer, norm, expected in (
        (-1, True, found.last_hidden_state),
        (-1, False, found.hidden_states[-1]),
        (-2, False, found.hidden_states[-2]),
        (-2, True, plain.final_layer_norm(found.hidden_states[-2])),
    ):
        other = build_stage("sd_tiny", {"text_encoder": {"hidden_layer": layer, "final_norm": norm}}).text_encoder
        assert torch.equal(other.encode(tokens)[0], expected)
        other.module.__class__ = type("Sharded", (type(module),), {})  # as FSDP2 does
        assert torch.equal(other.encode(tokens)[0], expected)
        assert other._state_PLD is None


def test_padding_is_by_the_given_token() -> None:
    stage = build_stage("sd_tiny", {"text_encoder": {"pad_token": "<|startoftext|>"}})
    ids = stage.tokenize([""])["input_ids"][0]
    assert set(ids[2:].tolist()) == {ids[0].item()}


def test_a_text_tower_that_trains_may_begin_from_nothing() -> None:
    parts = {"random_encoders": False, "vae": {"weights": "somewhere"}}
    make_stage("sd_tiny", parts, {"text_encoder": {"train": True}})
    with pytest.raises(ValueError, match=r"model\.text_encoder\.weights=null: .*needs frozen parts that are trained"):
        make_stage("sd_tiny", parts)


def test_every_part_of_a_pipeline_follows_the_networks_weights() -> None:
    specs = make_stage("sdxl", {"weights": "owner/name"}).weight_specs()
    assert [(spec.key, spec.part) for spec in specs if spec.source == "owner/name"] == [
        ("model.weights", "unet"),
        ("model.text_encoder.weights", "text_encoder"),
        ("model.text_encoder_2.weights", "text_encoder_2"),
        ("model.vae.weights", "vae"),
    ]
