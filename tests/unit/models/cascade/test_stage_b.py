"""Stage B: semantic latents of shrunken images as conditions, Stage A's latents as what is modelled."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from cascade_train.models.cascade.stage_b import Drawn
from cascade_train.models.stage import Stage
from tests.unit.models.stage_contract import StageContract
from tests.unit.models.stages import LEVELLED, build_stage
from tests.unit.tasks.task_contract import make_batch

SHRINKING = {**LEVELLED, "shrink_range": [0.3, 1.0], "image_size": 128}


class TestBTiny(StageContract):
    model = "b_tiny"

    def test_96_pixels_are_24_latents(self, stage: Stage) -> None:
        assert stage.latent_shape(96, 128) == (4, 24, 32)

    def test_its_network_halves_a_position_at_each_level_but_the_first(self, stage: Any) -> None:
        first, last = stage.decoded_multiples()
        noised = torch.zeros(1, *stage.latent_shape(last, last))
        cond = stage.conditions(stage.tokenize([""]))
        sides: set[int] = set()
        blocks = [block for level in stage.network.down_blocks for block in level]
        hooks = [each.register_forward_pre_hook(lambda _, inputs: sides.add(inputs[0].shape[-1])) for each in blocks]
        stage.predict(noised, torch.tensor([0.5]), cond)
        for hook in hooks:
            hook.remove()
        assert (last // first, 1) == (max(sides), min(sides))

    def test_dropped_images_are_zeros_and_others_their_semantic_latents(self, stage: Any, images: Any) -> None:
        cond = stage.conditions(stage.tokenize(["a", "b"]), images, torch.tensor([True, False]))
        assert set(cond) == {"clip_text_pooled", "effnet"}
        torch.testing.assert_close(cond["effnet"][0], stage.semantic_compressor.encode(images)[0])
        assert not cond["effnet"][1].any()

    def test_without_images_the_network_sees_what_dropped_images_give(self, stage: Any, images: Any) -> None:
        tokens, ratio = stage.tokenize(["a", "b"]), torch.tensor([0.3, 0.6])
        dropped = stage.conditions(tokens, images, torch.tensor([False, False]))
        noised = torch.randn(2, *stage.latent_shape(*images.shape[-2:]))
        preds = [stage.predict(noised, ratio, cond) for cond in (stage.conditions(tokens), dropped)]
        torch.testing.assert_close(*preds)

    def test_captions_lead_to_different_conditions(self, stage: Stage) -> None:
        cond = stage.conditions(stage.tokenize(["a red circle", "a blue circle"]))
        assert (cond["clip_text_pooled"][0] - cond["clip_text_pooled"][1]).abs().max() > 0.1

    def test_what_it_encodes_it_decodes_again(self, stage: Any) -> None:
        image = torch.full((1, 3, 96, 96), 0.9)
        image[:, 0, 20:50, 30:70] = 0.2
        assert (stage.decode(stage.encode(image)) - image).square().mean() < 0.002, "27 dB"


@pytest.fixture(scope="module")
def shrinking() -> Any:
    return build_stage("b_tiny", SHRINKING)


def test_an_image_shrinks_by_a_factor_of_its_own_to_whole_latents(shrinking: Any) -> None:
    sizes = shrinking.draw(make_batch(*range(40), side=128)).sizes
    assert {rows for rows, _ in sizes} == {32, 64, 96}
    assert all(rows == columns for rows, columns in sizes)
    assert shrinking.draw(make_batch(7, side=128)).sizes == sizes[7:8]
    assert shrinking.shrunken(1024, 1536, 0.7) == (704, 1056)
    assert shrinking.shrunken(32, 64, 0.3) == (32, 32)


def test_semantic_latents_get_noise_of_their_own_in_training_alone() -> None:
    stage = build_stage("b_tiny", {**SHRINKING, "semantic_noise": 0.5})
    batch = make_batch(*range(6), side=128)
    images, tokens = batch.image_BCHW.float() / 255, stage.tokenize(["a"] * 6)
    drawn = stage.draw(batch)
    clean = stage.conditions(tokens, images, None, Drawn(sizes=drawn.sizes))["effnet"]
    noise = stage.conditions(tokens, images, None, drawn)["effnet"] - clean
    assert len(set(drawn.sizes)) > 1
    assert 0.2 < noise.square().mean().sqrt() < 0.5  # of a 0.5 that resizing averages
    whole = [i for i, size in enumerate(drawn.sizes) if size == drawn.sizes[0]]
    same = Drawn(sizes=[drawn.sizes[0]] * len(whole), noise_BCHW=drawn.noise_BCHW[whole])
    added = stage.conditions({n: v[whole] for n, v in tokens.items()}, images[whole], None, same)["effnet"]
    plain = stage.semantic_compressor.encode(functional.interpolate(images[whole], drawn.sizes[0], mode="nearest"))
    height, width = plain.shape[-2:]
    torch.testing.assert_close(added - plain, 0.5 * drawn.noise_BCHW[whole][:, :, :height, :width])
    assert torch.equal(stage.draw(make_batch(3, side=128)).noise_BCHW, drawn.noise_BCHW[3:4])
    assert torch.equal(stage.conditions(tokens, images)["effnet"], stage.semantic_compressor.encode(images))


def test_neighbours_of_another_size_do_not_change_a_prediction(shrinking: Any) -> None:
    images, tokens = torch.rand(2, 3, 128, 160), shrinking.tokenize(["a", "b"])
    noised, ratio = torch.randn(2, *shrinking.latent_shape(128, 160)), torch.tensor([0.3, 0.6])
    torch.nn.init.normal_(shrinking.network.clf[1].weight)
    sizes = [(32, 64), (96, 128)]
    cond = shrinking.conditions(tokens, images, None, Drawn(sizes=sizes))
    assert cond["effnet"].shape == (2, 16, 16, 20)
    together = shrinking.predict(noised, ratio, cond)
    for i in range(2):
        part = slice(i, i + 1)
        mine = {name: value[part] for name, value in tokens.items()}
        cond = shrinking.conditions(mine, images[part], None, Drawn(sizes=sizes[part]))
        assert cond["effnet"].shape[-2:] == (sizes[i][0] // 32, sizes[i][1] // 32)
        alone = shrinking.predict(noised[part], ratio[part], cond)
        torch.testing.assert_close(alone, together[part], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(96, 96), (96, 160), (32, 64)])
def test_sizes_that_levels_cannot_halve_keep_their_shape(size: tuple[int, int]) -> None:
    stage = build_stage("b_tiny", LEVELLED)
    images = torch.rand(1, 3, *size)
    latent = stage.encode(images)
    pred = stage.predict(latent, torch.tensor([0.5]), stage.conditions(stage.tokenize(["a"]), images))
    assert pred.shape == latent.shape
