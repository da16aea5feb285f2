import pytest
import torch
from diffusers import StableCascadeUNet

from cascade_train.models.cascade.networks import unet as cascade_unet
from cascade_train.models.cascade.networks.controlnet import block_widths
from cascade_train.models.cascade.networks.unet import CascadeUNet
from tests.unit.launches import Launches
from tests.unit.models.stages import filled_network, network_inputs


@pytest.fixture(scope="module")
def network() -> CascadeUNet:
    return filled_network().eval()


def predict(network: CascadeUNet, **changes: object) -> torch.Tensor:
    return network(**(network_inputs() | changes), return_dict=False)[0]


def gradients(network: CascadeUNet, control: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    wanted = [p for p in network.parameters() if p.requires_grad] + list(control.values())
    return list(torch.autograd.grad(predict(network, control=control).square().sum(), wanted))


def controls(*indices: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {i: torch.randn(2, 32, 4, 5, generator=generator).requires_grad_() for i in indices}


def test_it_equals_its_parent_to_the_bit(network: CascadeUNet) -> None:
    parent = StableCascadeUNet.from_config(network.config).eval()
    parent.load_state_dict(network.state_dict())
    expected = parent(**network_inputs(), return_dict=False)[0]
    assert torch.equal(predict(network), expected)
    assert torch.equal(network(**network_inputs()).sample, expected)


@pytest.mark.parametrize(("repeats", "executed"), [([[1, 1], [1, 1]], 6), ([[1, 2], [3, 1]], 12)])
def test_stage_b_levels_in_pairs_equal_the_parent(repeats: list[list[int]], executed: int) -> None:
    pair = ["SDCascadeResBlock", "SDCascadeTimestepBlock"]
    network = filled_network(
        block_types_per_layer=[pair, [*pair, "SDCascadeAttnBlock"]],
        num_attention_heads=[0, 2],
        patch_size=2,
        clip_text_in_channels=None,
        clip_image_in_channels=None,
        effnet_in_channels=16,
        pixel_mapper_in_channels=3,
        timestep_conditioning_type=["sca"],
        switch_level=None,
        down_blocks_repeat_mappers=repeats[0],
        up_blocks_repeat_mappers=repeats[1],
    ).eval()
    parent = StableCascadeUNet.from_config(network.config).eval()
    parent.load_state_dict(network.state_dict())
    inputs = {
        "sample": torch.randn(2, 16, 8, 12),
        "timestep_ratio": torch.tensor([0.1, 0.7]),
        "clip_text_pooled": torch.randn(2, 1, 24),
        "effnet": torch.randn(2, 16, 3, 5),
    }
    assert torch.equal(network(**inputs).sample, parent(**inputs).sample)
    assert [len(unit) for unit in network.units()] == [2, 3, 3, 3, 3, 2]
    assert len(block_widths(network.config)) == executed


def test_control_index_counts_every_repeat_pass() -> None:
    network = filled_network(down_blocks_repeat_mappers=[1, 2], up_blocks_repeat_mappers=[2, 1]).eval()
    executed = 1 + 2 * 2 + 2 * 2 + 1
    assert len(block_widths(network.config)) == executed
    seen: list[torch.nn.Module] = []
    for unit in network.units():
        unit[0].register_forward_pre_hook(lambda module, _: seen.append(module))
    plain = predict(network)
    assert len(seen) == executed
    for index in (0, 2, executed - 1):
        assert not torch.equal(predict(network, control=controls(index)), plain)
    assert torch.equal(predict(network, control=controls(executed)), plain)


def test_control_is_resized_and_added_in_front_of_its_block(network: CascadeUNet) -> None:
    control = controls(3)
    added = torch.nn.functional.interpolate(control[3], (6, 7), mode="bilinear", align_corners=True)
    hook = network.units()[3][0].register_forward_pre_hook(lambda _, args: (args[0] + added, *args[1:]))
    by_hook = predict(network)
    hook.remove()
    assert torch.equal(predict(network, control=control), by_hook)


def test_control_gradients_are_exact_under_activation_checkpointing(network: CascadeUNet) -> None:
    control = controls(0, 2, 5)
    expected = gradients(network, control)
    network.gradient_checkpointing = True
    got = gradients(network, control)
    network.gradient_checkpointing = False
    assert all(gradient.abs().max() > 0 for gradient in expected[-3:])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_recomputation_keeps_fewer_activations(network: CascadeUNet) -> None:
    kept = []
    for enabled in (False, True):
        network.gradient_checkpointing = enabled
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            predict(network)
        kept.append(sum(sizes))
    network.gradient_checkpointing = False
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("where", ["probabilities", "output"])
def test_recomputation_replays_dropout(where: str) -> None:
    network = filled_network(dropout=[0.5, 0.5], attention_dropout=where).train()
    results = []
    for enabled in (False, True):
        network.gradient_checkpointing = enabled
        torch.manual_seed(7)
        results.append(gradients(network, controls(1)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputation_saves_the_generator_only_for_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def spy(function: object, *args: object, preserve_rng_state: bool, **_: object) -> object:
        asked.append(preserve_rng_state)
        return function(*args)

    monkeypatch.setattr(cascade_unet, "checkpoint", spy)
    network = filled_network(dropout=[0.0, 0.5]).train()
    network.gradient_checkpointing = True
    predict(network)
    assert asked == [False, True, True, True, True, False]


def test_bf16_weights_take_fp32_ratios_and_latents(network: CascadeUNet) -> None:
    half = filled_network().eval().to(torch.bfloat16)
    pred = predict(half, control=controls(1))
    assert pred.dtype == torch.bfloat16
    assert (pred.float() - predict(network, control=controls(1))).abs().max() < 0.1 * predict(network).abs().max()


def test_time_is_embedded_in_fp32_whatever_the_weights(network: CascadeUNet) -> None:
    half = filled_network().to(torch.bfloat16)
    ratio = torch.rand(8)
    assert torch.equal(half.time_embedding(ratio, None, None), network.time_embedding(ratio, None, None))
    assert half.time_embedding(ratio, None, None).shape == (8, 3 * 64)


def test_a_ratio_and_its_side_conditions_are_embedded_at_once(network: CascadeUNet) -> None:
    ratio, sca, crp = torch.rand(5), torch.rand(5), torch.zeros(5)
    with Launches() as one:
        parts = [network.get_timestep_ratio_embedding(each) for each in (ratio, sca, crp)]
    with Launches() as launches:
        embedded = network.time_embedding(ratio, sca, None)
    assert torch.equal(embedded, torch.cat(parts, dim=1))
    assert launches.names == ["zeros_like", "stack", *one.names[: len(one.names) // 3]]


def test_side_conditions_of_time_are_tensors_of_any_batch(network: CascadeUNet) -> None:
    zeros = torch.zeros(2)
    assert torch.equal(predict(network, sca=zeros, crp=zeros), predict(network))
    some = predict(network, sca=torch.tensor([0.0, 0.5]))
    assert torch.equal(some[0], predict(network)[0])
    assert not torch.equal(some[1], predict(network)[1])


def test_embeddings_without_a_token_axis_mean_one_token(network: CascadeUNet) -> None:
    inputs = network_inputs()
    flat = predict(network, clip_text_pooled=inputs["clip_text_pooled"][:, 0], clip_img=inputs["clip_img"][:, 0])
    assert torch.equal(flat, predict(network))


@pytest.mark.parametrize("missing", ["clip_img", "clip_text"])
def test_text_and_image_embeddings_belong_together(network: CascadeUNet, missing: str) -> None:
    with pytest.raises(ValueError, match="clip_text and clip_img belong together"):
        predict(network, **{missing: None})


def test_skip_of_another_size_is_resized() -> None:
    network = filled_network(switch_level=[True]).eval()
    assert predict(network, sample=torch.randn(2, 16, 5, 7)).shape == (2, 16, 5, 7)


def test_batches_do_not_mix(network: CascadeUNet) -> None:
    inputs = {key: value[:1] for key, value in network_inputs().items()}
    torch.testing.assert_close(network(**inputs).sample, predict(network)[:1], atol=1e-4, rtol=1e-4)
