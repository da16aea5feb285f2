"""Stage A as a stage, and its network against diffusers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.latent_codec import VQGAN
from cascade_train.models.initialize import Fill, fill_
from cascade_train.models.networks.discriminator import build_discriminator
from cascade_train.tasks.vqgan import count_codes, revive, unused_since
from tests.unit.models.stages import build_stage, make_stage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stage() -> Any:
    built = build_stage("a_tiny")
    for name, parameter in built.network.named_parameters():
        fill_(parameter, Fill(kind="normal", scale=0.1), 0, name)
    return built


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference(stage: Any) -> PaellaVQModel:
    model = PaellaVQModel(**stage.arguments).eval()
    model.load_state_dict(stage.network.state_dict())
    return model


def test_latents_and_pictures_have_their_shapes_and_ranges(stage: Any, images: torch.Tensor) -> None:
    latent = stage.encode(images)
    assert tuple(latent.shape[1:]) == stage.latent_shape(32, 48) == (4, 8, 12)
    picture = stage.decode(50 * latent)
    assert picture.shape == images.shape
    assert 0 <= picture.min() < picture.max() <= 1
    assert not latent.requires_grad
    assert not picture.requires_grad
    assert stage.encode(images[:1]).shape == (1, 4, 8, 12)


def test_statistics_of_norms_and_what_is_made_stay_fp32_where_weights_are_bf16(images: torch.Tensor) -> None:
    stage = make_stage("a_tiny")
    stage.build(device=CPU, network_dtype=torch.bfloat16, frozen_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in stage.network.parameters()} == {torch.bfloat16}
    buffers = {name: buffer.dtype for name, buffer in stage.network.named_buffers() if buffer.is_floating_point()}
    assert len(buffers) == 2
    assert set(buffers.values()) == {torch.float32}
    exact = make_stage("a_tiny")
    exact.build(device=CPU, network_dtype=torch.float32, frozen_dtype=torch.float32)
    torch.testing.assert_close(stage.encode(images), exact.encode(images), rtol=0.1, atol=0.05)
    made = stage.network(images, quantised_B=torch.tensor([True, True]))
    assert made.latent_BChw.dtype == made.image_BCHW.dtype == made.code_BChw.dtype == torch.float32


def test_the_scale_divides_latents_and_leaves_pictures_alone(stage: Any, images: torch.Tensor) -> None:
    other = build_stage("a_tiny", {"scale_factor": stage.scale_factor / 2})
    other.network = stage.network
    torch.testing.assert_close(other.encode(images), 2 * stage.encode(images))
    torch.testing.assert_close(other.decode(other.encode(images)), stage.decode(stage.encode(images)))


@torch.no_grad()
def test_the_network_is_that_of_diffusers(stage: Any, images: torch.Tensor, reference: PaellaVQModel) -> None:
    made = stage.network(images)
    torch.testing.assert_close(made.latent_BChw, reference.encode(images).latents)
    torch.testing.assert_close(made.image_BCHW, reference(images).sample)
    quantised = stage.network(images, quantised_B=torch.tensor([True, False])).image_BCHW
    expected = reference.decode(made.latent_BChw, force_not_quantize=False).sample
    torch.testing.assert_close(quantised[0], expected[0])
    torch.testing.assert_close(quantised[1], made.image_BCHW[1])
    assert made.code_BChw.shape == made.latent_BChw.shape
    assert made.index_Bhw.shape == (2, 8, 12)


def test_gradients_pass_straight_through_the_codes(stage: Any, images: torch.Tensor) -> None:
    network = stage.network
    made = network(images, quantised_B=torch.tensor([True, True]))
    latent = made.code_BChw.detach().requires_grad_()
    (at_code,) = torch.autograd.grad(network(latent, only="decode").square().sum(), latent)
    (at_latent,) = torch.autograd.grad(made.image_BCHW.square().sum(), made.latent_BChw)
    torch.testing.assert_close(at_latent, at_code, rtol=1e-4, atol=1e-5)


def test_a_sample_does_not_depend_on_its_neighbours_in_train_mode(stage: Any, images: torch.Tensor) -> None:
    stage.network.train()
    before = {name: buffer.clone() for name, buffer in stage.network.named_buffers()}
    torch.testing.assert_close(stage.network(images).latent_BChw[:1], stage.network(images[:1]).latent_BChw)
    assert all(torch.equal(buffer, before[name]) for name, buffer in stage.network.named_buffers())


def test_recomputation_does_not_change_gradients(stage: Any, images: torch.Tensor) -> None:
    parameters, gradients = list(stage.network.parameters()), []
    for enabled in (False, True):
        stage.set_activation_checkpointing(enabled)
        made = stage.network(images, quantised_B=torch.tensor([True, False]))
        loss = made.image_BCHW.square().mean() + made.code_BChw.square().mean()
        gradients.append(torch.autograd.grad(loss, parameters))
    stage.set_activation_checkpointing(False)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(gradient.any() for gradient in gradients[0])


def test_units_are_the_residual_blocks(stage: Any) -> None:
    assert [type(module).__name__ for (module,) in stage.units()] == ["MixingResidualBlock"] * 6
    assert stage.frozen_modules() == stage.tokenize(["a"]) == stage.conditions({}) == {}
    stage.set_attention("math")


def test_the_originals_file_and_a_run_load_as_a_stage_and_frozen(
    stage: Any, images: torch.Tensor, tmp_path: Path
) -> None:
    state = stage.network.state_dict()
    renamed = {name.replace("vquantizer.embedding.", "vquantizer.codebook."): value for name, value in state.items()}
    save_file(renamed, tmp_path / "stage_a.safetensors")
    (tmp_path / "export" / "vqgan").mkdir(parents=True)
    save_file(state, tmp_path / "export" / "vqgan" / "diffusion_pytorch_model.safetensors")
    for source in (tmp_path / "stage_a.safetensors", tmp_path):
        loaded = build_stage("a_tiny", {"weights": str(source)})
        assert torch.equal(loaded.encode(images), stage.encode(images))
        frozen = VQGAN(weights=str(source), **stage.arguments)
        frozen.build(device=CPU)
        assert not frozen.module.training
        latent = frozen.encode(images)
        torch.testing.assert_close(latent, stage.encode(images))
        torch.testing.assert_close(frozen.decode(latent).clamp(0, 1), stage.decode(latent))
        assert not latent.requires_grad
        assert not frozen.decode(latent).requires_grad
    with pytest.raises(ConfigError, match=r"model.weights=.*not the weights of this model|this model needs"):
        build_stage("a_tiny", {"weights": str(tmp_path), "embed_dim": 32})
    with pytest.raises(ConfigError, match="model.stage_a.weights=.*this model needs"):
        VQGAN(weights=str(tmp_path), **stage.arguments | {"embed_dim": 32}).build(device=CPU)
    with pytest.raises(ValueError, match="stage_a.scale_factor=0.0 must be greater than 0"):
        VQGAN(weights=None, **stage.arguments | {"scale_factor": 0.0})


def test_codes_are_counted_and_dead_ones_revived_in_order() -> None:
    counts = count_codes(torch.tensor([[0, 2], [2, 2]]), 5)
    assert counts.tolist() == [1.0, 0.0, 3.0, 0.0, 0.0]
    unused = unused_since(torch.tensor([4, 1, 7, 0, 1]), counts)
    assert unused.tolist() == [0, 2, 0, 1, 2]
    weight = nn.Parameter(torch.zeros(5, 2))
    left = revive(weight, torch.tensor([0, 2, 0, 1, 2]), torch.tensor([[5.0, 6.0]]), after_steps=2)
    assert weight.tolist() == [[0, 0], [5, 6], [0, 0], [0, 0], [0, 0]]
    assert left.tolist() == [0, 0, 0, 1, 2]


def test_a_discriminator_scores_patches_sample_by_sample() -> None:
    discriminator = build_discriminator(channels=8, layers=2, seed=0, device=CPU)
    images = torch.rand(2, 3, 20, 32)
    scores = discriminator(images)
    assert scores.shape == (2, 5, 8)
    torch.testing.assert_close(discriminator(images[:1]), scores[:1])
    again = build_discriminator(channels=8, layers=2, seed=0, device=CPU)
    assert torch.equal(again(images), scores)


def test_a_discriminator_is_leaky_with_the_slope_of_the_paper() -> None:
    """Isola et al. 2017, section 6.1.2: all ReLUs of the discriminator have slope 0.2."""
    discriminator = build_discriminator(channels=8, layers=1, seed=0, device=CPU)
    images = torch.rand(2, 3, 20, 32)
    (first, _), (second, norm, _) = discriminator.blocks
    x = functional.leaky_relu(first(2 * images - 1), negative_slope=0.2)
    x = functional.leaky_relu(norm(second(x)), negative_slope=0.2)
    torch.testing.assert_close(discriminator(images), discriminator.head(x)[:, 0])
