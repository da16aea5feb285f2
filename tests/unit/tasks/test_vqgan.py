"""Each term of Stage A's loss against numbers by hand, and where its gradient goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.tasks.vqgan import Adversarial, Perceptual, Vqgan, adaptive_weight, hinge, with_gradient

OPPONENT = {"start_step": None, "weight": 0.8, "max_weight": 10.0, "channels": 8, "layers": 2, "seed": 0}
FEATURES = {"weights": None, "weight": 1.0, "start_step": 1}
ARGUMENTS = {
    "pixel": "l1",
    "codebook_weight": 1.0,
    "commitment_weight": 0.25,
    "quantised_share": 1.0,
    "revive_after_steps": None,
    "train_encoder": True,
    "train_decoder": True,
}


def vqgan(**changed: Any) -> Vqgan:
    parts = {"perceptual": Perceptual(**FEATURES), "adversarial": Adversarial(**OPPONENT)}
    return Vqgan(**(ARGUMENTS | parts | changed))


def test_pixels_are_means_of_each_sample() -> None:
    image, original = torch.zeros(2, 3, 2, 2), torch.zeros(2, 3, 2, 2)
    image[1, 0, 0, 0] = 0.6
    torch.testing.assert_close(vqgan().pixels(image, original), torch.tensor([0.0, 0.6 / 12]))
    torch.testing.assert_close(vqgan(pixel="l2").pixels(image, original), torch.tensor([0.0, 0.36 / 12]))


def test_codes_go_to_latents_and_latents_a_quarter_as_much_to_codes() -> None:
    latent = torch.full((1, 4, 1, 1), 3.0, requires_grad=True)
    code = torch.full((1, 4, 1, 1), 1.0, requires_grad=True)
    loss = vqgan().codes(latent, code)
    torch.testing.assert_close(loss, torch.tensor([4.0 + 0.25 * 4.0]))
    loss.sum().backward()
    torch.testing.assert_close(code.grad, torch.full_like(code, -2 * 2.0 / 4))
    torch.testing.assert_close(latent.grad, torch.full_like(latent, 0.25 * 2 * 2.0 / 4))


def test_the_adaptive_weight_makes_gradients_equally_long_sample_by_sample() -> None:
    first, other = torch.zeros(3, 3, 2, 2), torch.zeros(3, 3, 2, 2)
    first[:, 0, 0, 0], first[:, 1, 0, 0] = 3.0, 4.0
    other[0, 2, 1, 1], other[1, 2, 1, 1] = 2.0, 0.01
    torch.testing.assert_close(adaptive_weight(first, other, most=100.0), torch.tensor([2.5, 100.0, 100.0]))


def test_hinge_scores_what_is_on_the_wrong_side_of_one() -> None:
    real, fake = torch.tensor([[[2.0, 0.5]]]), torch.tensor([[[-3.0, 0.0]]])
    torch.testing.assert_close(hinge(real, fake), torch.tensor([0.5 * ((0 + 0.5) / 2 + (0 + 1.0) / 2)]))


def test_a_loss_differentiated_at_a_picture_is_handed_on() -> None:
    made = torch.rand(2, 3, 2, 2, requires_grad=True)
    wanted = torch.rand(2, 3, 2, 2)
    loss = with_gradient(made, torch.tensor([5.0, 7.0]), wanted)
    assert loss.tolist() == [5.0, 7.0]
    loss.sum().backward()
    assert torch.equal(made.grad, wanted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pixel": "l3"}, "pixel=l3 is unknown"),
        ({"codebook_weight": -1.0}, "codebook_weight=-1.0 must lie"),
        ({"commitment_weight": -1.0}, "commitment_weight=-1.0 must lie"),
        ({"quantised_share": 1.5}, "quantised_share=1.5 must lie"),
        ({"revive_after_steps": 0}, "revive_after_steps=0 must lie"),
        ({"train_encoder": False, "train_decoder": False}, "objective.train_encoder=false.*nothing would train"),
    ],
)
def test_options_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        vqgan(**changed)


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        (Adversarial, {"start_step": 0}, "adversarial.start_step=0 must lie"),
        (Adversarial, {"max_weight": -1.0}, "adversarial.max_weight=-1.0 must lie"),
        (Adversarial, {"layers": 9}, "adversarial.layers=9 must lie"),
        (Perceptual, {"weight": -1.0}, "perceptual.weight=-1.0 must lie"),
        (Perceptual, {"start_step": 0}, "perceptual.start_step=0 must lie"),
    ],
)
def test_parts_refuse_options_out_of_range(part: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        part(**((OPPONENT if part is Adversarial else FEATURES) | changed))
