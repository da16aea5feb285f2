"""Training of Stage A: each term of its loss against numbers by hand, the contract, and what is particular."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from torch._subclasses.fake_tensor import FakeTensorMode

from cascade_train.engine.phase import whole_state
from cascade_train.errors import ConfigError
from cascade_train.tasks.autoencoding import Adversarial, Perceptual, adaptive_weight, hinge, with_gradient
from cascade_train.tasks.reconstruction import Reconstruction
from cascade_train.tasks.vqgan import Vqgan, revive
from tests.unit.tasks.task_contract import TaskContract, attached, batch_for, component, make_batch, trainable

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


adversarial, perceptual = partial(Adversarial, **OPPONENT), partial(Perceptual, **FEATURES)


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        (vqgan, {"pixel": "l3"}, "pixel=l3 is unknown"),
        (vqgan, {"codebook_weight": -1.0}, "codebook_weight=-1.0 must lie"),
        (vqgan, {"quantised_share": 1.5}, "quantised_share=1.5 must lie"),
        (vqgan, {"revive_after_steps": 0}, "revive_after_steps=0 must lie"),
        (vqgan, {"train_encoder": False, "train_decoder": False}, "objective.train_encoder=false.*nothing would train"),
        (adversarial, {"start_step": 0}, "adversarial.start_step=0 must lie"),
        (perceptual, {"start_step": 0}, "perceptual.start_step=0 must lie"),
    ],
)
def test_options_out_of_range_are_refused(part: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        part(**changed)


def autoencoding(**changed: Any) -> Any:
    objective = component("objective", "vqgan", **changed)
    return attached(component("task", "reconstruction").for_objective(objective), "a_tiny", objective)


def with_discriminator(**changed: Any) -> dict[str, Any]:
    return {"adversarial": {"start_step": 1, "channels": 8, "layers": 2, **changed}}


class DenoisesNothing(TaskContract):
    """The contract without what only tasks that denoise promise."""

    option = "reconstruction"
    model = "a_tiny"
    objective = "vqgan"
    lr = 1e-4
    test_a_caption_steers_the_prediction = None
    test_evaluation_is_a_fixed_number_per_sample_and_noise_level = None


class TestAutoencoding(DenoisesNothing):
    """Without a discriminator."""


class TestWithADiscriminator(DenoisesNothing):
    """With a discriminator from the first step on."""

    @classmethod
    def make(cls) -> Any:
        return autoencoding(**with_discriminator())


def test_the_discriminator_has_a_phase_and_an_optimizer_of_its_own_from_its_step_on() -> None:
    own, other = autoencoding(**with_discriminator(start_step=5)).phases()
    assert (own.start_step, other.start_step) == (1, 5)
    assert own.averaged
    assert not other.averaged
    assert not {id(p) for p in trainable(own).values()} & {id(p) for p in trainable(other).values()}


def test_the_discriminator_counts_from_its_step_on_and_gets_no_gradient_from_the_autoencoder() -> None:
    task = autoencoding(**with_discriminator(start_step=2))
    prepared = task.prepare_batch(batch_for(task, 0, 1))
    before = task.loss(prepared)
    assert "loss_adversarial" not in before.report
    task.after_step({**before.report, **before.totals})
    output = task.loss(prepared)
    expected = before.loss_B + 0.8 * output.report["adaptive_weight"] * output.report["loss_adversarial"]
    torch.testing.assert_close(output.loss_B, expected)
    output.loss_B.sum().backward()
    assert all(parameter.grad is None for parameter in task.discriminator.parameters())


def test_the_adaptive_weight_is_the_ratio_of_gradients_at_the_reconstruction() -> None:
    task = autoencoding(**with_discriminator(), revive_after_steps=None)
    prepared = task.prepare_batch(batch_for(task, 0))
    made = task.stage.network(prepared.image_BCHW, quantised_B=prepared.quantised_B).image_BCHW.detach()
    made.requires_grad_()
    (own,) = torch.autograd.grad((made - prepared.image_BCHW).abs().mean(), made)
    (other,) = torch.autograd.grad(-task.discriminator(made).mean(), made)
    found = task.loss(prepared).report["adaptive_weight"]
    torch.testing.assert_close(found, (own.norm() / other.norm())[None], rtol=1e-4, atol=0)


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_one_half_can_stay_as_it_is_and_is_still_exported(half: str, tmp_path: Path) -> None:
    task = autoencoding(**{f"train_{half}": False})
    frozen = ("in_block", "down_blocks", "vquantizer") if half == "encoder" else ("up_blocks", "out_block")
    names = trainable(task.phases()[0])
    assert names
    assert not any(name.removeprefix("network.").startswith(frozen) for name in names)
    export = task.exports()["vqgan"]
    state = whole_state(export.module, frozen=export.whole)
    assert state.keys() == task.stage.network.state_dict().keys()
    assert export.write(state, tmp_path / "vqgan") == 0.0
    loaded = PaellaVQModel.from_pretrained(tmp_path / "vqgan").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())


def test_codes_that_nobody_chose_take_the_places_of_latents_that_samples_offer() -> None:
    task = autoencoding(revive_after_steps=1)
    weight = task.stage.network.vquantizer.embedding.weight
    output = task.loss(task.prepare_batch(batch_for(task, 0, 1)))
    before, dead = weight.detach().clone(), output.totals["code_counts"] == 0
    shown = task.after_step({**output.report, **output.totals})
    assert float(shown["codes_used"]) == pytest.approx(1 - float(dead.float().mean()))
    offered = output.report["candidates"].reshape(-1, 4)
    changed = (weight != before).any(dim=1).nonzero().flatten()
    assert torch.equal(changed, dead.nonzero().flatten()[: len(offered)])
    assert torch.equal(weight[changed], offered[: len(changed)])


def test_codes_are_revived_where_they_are_offloaded_to_the_host() -> None:
    with FakeTensorMode():  # a device without one; operations across devices fail
        counts, candidates = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.ones(3, 2, device="cuda")
        unused = revive(torch.nn.Parameter(torch.zeros(4, 2)), counts, candidates, after_steps=1)
    assert unused.device.type == "cuda"


def test_nobody_is_quantised_where_nobody_shall_be() -> None:
    never, always = (autoencoding(quantised_share=share) for share in (0.0, 1.0))
    prepared = [task.prepare_batch(make_batch(*range(8))) for task in (never, always)]
    assert not prepared[0].quantised_B.any()
    assert prepared[1].quantised_B.all()


@pytest.mark.parametrize("name", ["vqgan", "preview"])
@pytest.mark.parametrize(("key", "value"), [("cond_drop_prob", 0.1), ("image_keep_prob", 0.5)])
def test_options_of_stage_b_are_refused(name: str, key: str, value: float) -> None:
    task = Reconstruction(**({"cond_drop_prob": None, "image_keep_prob": None} | {key: value}))
    with pytest.raises(ConfigError, match=f"task.{key}={value}: is for Stage B; what trains by this objective sees"):
        task.for_objective(component("objective", name))
    assert task.for_objective(component("objective", "gdf")) is task


@pytest.mark.parametrize("changed", [{}, with_discriminator()], ids=["pixels", "discriminator"])
def test_places_that_a_mask_leaves_out_teach_nothing(changed: dict[str, Any]) -> None:
    task = autoencoding(codebook_weight=0.0, commitment_weight=0.0, **changed)
    batch, mask = make_batch(0), torch.zeros(1, 1, 96, 96, dtype=torch.uint8)
    mask[..., :48] = 255
    masked, whole = (task.prepare_batch(replace(batch, tensors=given)) for given in ({"mask": mask}, {}))
    made = task.stage.network(masked.image_BCHW).image_BCHW
    kept = (made - masked.image_BCHW).abs()[..., :48].mean().detach()
    torch.testing.assert_close(task.objective.pixels(made, masked.image_BCHW, masked.mask_B1HW), kept[None])

    images: list[torch.Tensor] = []
    task.stage.network.register_forward_hook(lambda _module, _given, result: images.append(result.image_BCHW))
    for prepared in (masked, whole):
        loss = task.loss(prepared).loss_B.sum()
        images[-1].retain_grad()
        loss.backward()
    gradients = [image.grad.abs().amax(dim=(0, 1, 2)) for image in images]
    assert gradients[0][48:].max() == 0.0 < gradients[1][48:].max()
    assert gradients[0][:48].min() > 0.0
