"""Training of Stable Diffusion's autoencoder: the contract, and a step as diffusers and torch alone compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from cascade_train.errors import ConfigError
from cascade_train.tasks.autoencoder_kl import Lpips
from tests.unit.tasks.task_contract import attached, batch_for, component, left, trainable
from tests.unit.tasks.test_vqgan import DenoisesNothing, with_discriminator

KL_WEIGHT = 1e-3


def autoencoding(**changed: Any) -> Any:
    objective = component("objective", "autoencoder_kl", **changed)
    return attached(component("task", "reconstruction").for_objective(objective), "vae_tiny", objective)


class TestAutoencodingKL(DenoisesNothing):
    """With a discriminator from the first step on."""

    model, objective = "vae_tiny", "autoencoder_kl"
    lr = 1e-3

    @classmethod
    def make(cls) -> Any:
        return autoencoding(**with_discriminator())


def features(image: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return a distance (B,) of pictures in [0, 1] that is none of their pixels'."""
    small = torch.nn.functional.avg_pool2d(image - original, 4)
    return small.square().sum(dim=(1, 2, 3))


def original_loss(vae: AutoencoderKL, prepared: Any, pixel: str, discriminator: Any) -> torch.Tensor:
    """Return the loss of each sample as the latent diffusion code has it, by diffusers and torch.

    Summed over pixels in [-1, 1], the perceptual distance added to each; the adaptive weight as this library takes it,
    at the reconstruction and for each sample.
    """
    original = 2 * prepared.image_BCHW - 1
    posterior = vae.encode(original).latent_dist
    made = vae.decode(posterior.mean + posterior.std * prepared.normal_BChw).sample
    distance = (original - made).abs() if pixel == "l1" else (original - made).square()
    perceptual = features((made + 1) / 2, prepared.image_BCHW)
    nll = (distance + perceptual[:, None, None, None]).sum(dim=(1, 2, 3))
    loss = nll + KL_WEIGHT * posterior.kl()
    if discriminator is None:
        return loss
    fooled = -discriminator((made + 1) / 2).mean(dim=(1, 2))
    lengths = [
        torch.autograd.grad(each.sum(), made, retain_graph=True)[0].flatten(1).norm(dim=1) for each in (nll, fooled)
    ]
    return loss + 0.5 * lengths[0] / lengths[1] * fooled


@pytest.mark.parametrize(("pixel", "adversarial"), [("l1", True), ("l2", False)])
def test_a_training_step_is_that_of_diffusers_and_torch(pixel: str, adversarial: bool, tmp_path: Path) -> None:
    opponent = with_discriminator(weight=0.5, max_weight=1e6) if adversarial else {}
    task = autoencoding(pixel=pixel, kl_weight=KL_WEIGHT, **opponent)
    task.features = features
    folder = left(task, "vae", tmp_path)
    prepared = task.prepare_batch(batch_for(task, 0, 1, 2))
    output = task.loss(prepared)
    output.loss_B.mean().backward()
    vae = AutoencoderKL.from_pretrained(folder)
    expected_B = original_loss(vae, prepared, pixel, task.discriminator) / prepared.image_BCHW[0].numel()
    expected_B.mean().backward()
    torch.testing.assert_close(output.loss_B, expected_B, atol=1e-5, rtol=1e-5)
    assert (output.report["kl"] > 0).all()
    gradients = {name: parameter.grad for name, parameter in vae.named_parameters()}
    assert len(gradients) == len(list(task.stage.network.parameters())) > 50
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in task.stage.network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5 * largest, rtol=1e-4, msg=name)


def test_latents_and_pictures_are_those_of_diffusers(tmp_path: Path) -> None:
    task = autoencoding()
    task.stage.exports()["vae"](task.stage.network.state_dict(), tmp_path / "vae")
    vae, images = AutoencoderKL.from_pretrained(tmp_path / "vae"), torch.rand(2, 3, 32, 40)
    task.stage.scaling_factor = 0.5
    latent = task.stage.encode(images)
    assert latent.shape[1:] == task.stage.latent_shape(32, 40)
    torch.testing.assert_close(latent, 0.5 * vae.encode(2 * images - 1).latent_dist.mean)
    torch.testing.assert_close(task.stage.decode(latent), (vae.decode(2 * latent).sample / 2 + 0.5).clamp(0, 1))


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_one_half_can_stay_as_it_is(half: str) -> None:
    task = autoencoding(**{f"train_{half}": False})
    frozen = ("encoder", "quant_conv") if half == "encoder" else ("decoder", "post_quant_conv")
    names = {name.removeprefix("network.") for name in trainable(task.phases()[0])}
    everything = {name for name, _ in task.stage.network.named_parameters()}
    assert everything - names == {name for name in everything if name.startswith(frozen)} != set()
    assert task.exports()["vae"].whole


def test_recomputed_activations_change_no_gradient() -> None:
    task = autoencoding()
    prepared = task.prepare_batch(batch_for(task, 0))
    found = []
    for recomputes in (False, True):
        task.stage.set_activation_checkpointing(recomputes)
        assert task.stage.network.decoder.gradient_checkpointing == recomputes
        task.stage.network.zero_grad()
        task.loss(prepared).loss_B.sum().backward()
        found.append({name: parameter.grad for name, parameter in task.stage.network.named_parameters()})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_the_measures_are_of_latents_before_their_scale() -> None:
    task = autoencoding()
    prepared = task.prepare_batch(batch_for(task, 0))
    made = task.reconstruct(prepared)
    found = task.measures(prepared, [])
    expected = (made.mean_BChw.square() + made.std_BChw.square()).mean(dim=(1, 2, 3)).sqrt()
    torch.testing.assert_close(found["latent_rms"], expected)
    torch.testing.assert_close(found["kl"], made.kl_B)


def test_lpips_needs_its_file() -> None:
    options = {"weight": 1.0, "start_step": 1}
    assert Lpips(weights=None, **options).build(torch.device("cpu")) is None
    with pytest.raises(ConfigError, match=r"objective\.perceptual\.weights=nowhere\.pth: no such file"):
        Lpips(weights="nowhere.pth", **options).build(torch.device("cpu"))


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kl_weight=-1\.0 must lie"):
        component("objective", "autoencoder_kl", kl_weight=-1.0)
