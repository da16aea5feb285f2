import pytest
import torch

from cascade_train.distributed.parallelize import materialise
from cascade_train.models.stage import Stage
from tests.unit.models.stage_contract import StageContract
from tests.unit.models.stages import build_stage, make_stage, random_weights

TINY_VISION = {
    "_target_": "cascade_train.models.cascade.image_encoder.ImageEncoder",
    "weights": None,
    "subfolder": None,
    "image_size_px": 28,
    "patch_size_px": 14,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "projection_dim": 128,
    "hidden_act": "gelu",
}


class TestCTiny(StageContract):
    model = "c_tiny"

    def test_96_pixels_are_3_latents(self, stage: Stage) -> None:
        assert stage.latent_shape(96, 128) == (16, 3, 4)

    def test_image_condition_is_zeros_without_an_image_tower(self, stage: Stage, images: torch.Tensor) -> None:
        cond = stage.conditions(stage.tokenize(["a", "b"]), images)
        assert cond["clip_img"].shape == (2, 1, 128)
        assert not cond["clip_img"].any()

    def test_captions_lead_to_different_conditions(self, stage: Stage) -> None:
        cond = stage.conditions(stage.tokenize(["a red circle", "a blue circle"]))
        for key in ("clip_text", "clip_text_pooled"):
            assert (cond[key][0] - cond[key][1]).abs().max() > 0.1


@pytest.fixture(scope="module")
def seeing_stage() -> Stage:
    return build_stage("c_tiny", {"image_encoder": TINY_VISION})


def test_image_condition_is_kept_only_where_asked(seeing_stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(3, 3, 96, 96)
    tokens = seeing_stage.tokenize(["a"] * 3)
    tower, seen = seeing_stage.image_encoder, []
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda shown: seen.append(len(shown)) or encode(shown))
    kept = seeing_stage.conditions(tokens, images, torch.tensor([True, False, True]))["clip_img"]
    assert not seeing_stage.conditions(tokens, images, torch.zeros(3, dtype=torch.bool))["clip_img"].any()
    assert seen == [2], "the tower sees what is kept, and is not asked for nothing"
    every = seeing_stage.conditions(tokens, images)["clip_img"]
    assert kept.shape == (3, 1, 128)
    torch.testing.assert_close(kept[[0, 2]], every[[0, 2]], rtol=1e-5, atol=1e-6)
    assert every.abs().amin(dim=(1, 2)).shape == (3,)
    assert every[1].any()
    assert not kept[1].any()


def test_no_image_is_a_zero_condition(seeing_stage: Stage) -> None:
    assert not seeing_stage.conditions(seeing_stage.tokenize(["a"]))["clip_img"].any()


def test_frozen_towers_take_the_frozen_dtype_and_the_compressor_does_not(seeing_stage: Stage) -> None:
    stage = make_stage("c_tiny", {"image_encoder": TINY_VISION})
    stage.build(device=torch.device("cpu"), network_dtype=torch.float32, frozen_dtype=torch.bfloat16)
    stage.fill(materialise(stage.network, torch.device("cpu")))
    images = torch.rand(1, 3, 96, 96)
    cond = stage.conditions(stage.tokenize(["a red circle"]), images)
    assert {value.dtype for value in cond.values()} == {torch.bfloat16}
    assert {p.dtype for p in stage.network.parameters()} == {torch.float32}
    assert torch.equal(stage.encode(images), seeing_stage.encode(images))
    assert stage.predict(stage.encode(images), torch.tensor([0.5]), cond).dtype == torch.float32


def test_another_seed_gives_other_network_weights_but_the_same_towers() -> None:
    one, two = (build_stage("c_tiny", {"weights": None, "seed": seed}) for seed in (0, 1))
    assert not torch.equal(one.network.embedding[1].weight, two.network.embedding[1].weight)
    left, right = (s.frozen_modules()["text_encoder"].state_dict() for s in (one, two))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_full_size_parts_run_with_narrow_towers() -> None:
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    stage = build_stage(
        "c_1b",
        random_weights(),
        {
            "text_encoder": small | {"projection_dim": 128},
            "image_encoder": small | {"projection_dim": 128},
            "network": {
                "block_out_channels": [32, 32],
                "num_attention_heads": [2, 2],
                "conditioning_dim": 32,
                "down_num_layers_per_block": [1, 1],
                "up_num_layers_per_block": [1, 1],
                "clip_text_in_channels": 128,
                "clip_text_pooled_in_channels": 128,
                "clip_image_in_channels": 128,
            },
        },
    )
    images = torch.rand(1, 3, 96, 64)
    latent = stage.encode(images)
    assert latent.shape == (1, 16, 3, 2)
    cond = stage.conditions(stage.tokenize(["a cat"]), images)
    assert cond["clip_text"].shape == (1, 77, 128)
    assert stage.predict(latent, torch.tensor([0.5]), cond).shape == latent.shape
    assert stage.decode(latent).shape == (1, 3, 24, 16)
