"""The control network: which blocks it controls, that it begins silent, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cascade_train.models.cascade.networks import controlnet
from cascade_train.models.cascade.networks.controlnet import (
    ControlNetwork,
    ControlSpec,
    block_widths,
    build_control_network,
    mirrored_blocks,
)
from tests.unit.models.stages import filled_network, make_stage, network_inputs

CPU = torch.device("cpu")
PUBLISHED = (0, 4, 8, 12, 51, 55, 59, 63)
COUNTS = {
    "canny": (1, "effnet", PUBLISHED, 54_255_776, 796),
    "inpainting": (4, "effnet", PUBLISHED, 54_256_424, 796),
    "super_resolution": (16, "large", PUBLISHED, 203_491_584, 86),
    "identity": (512, "simple", tuple(range(64)), 102_763_008, 132),
}
"""Channels, bottleneck and blocks of the original's, and the number of their weights and stored tensors."""


def spec(blocks: tuple[int, ...] = (0, 2, 5), *, channels: int = 1, bottleneck: str = "small") -> ControlSpec:
    return ControlSpec(channels=channels, bottleneck=bottleneck, blocks=blocks, widths=(32,) * len(blocks))


def audible(made: ControlNetwork) -> ControlNetwork:
    """Give the last layers values, as after some training."""
    for i, projection in enumerate(made.projections):
        nn.init.normal_(projection[2].weight, std=0.1, generator=torch.Generator().manual_seed(i))
    return made


@pytest.mark.parametrize("name", COUNTS)
def test_the_originals_sizes(name: str) -> None:
    channels, bottleneck, blocks, weights, tensors = COUNTS[name]
    with torch.device("meta"):
        made = ControlNetwork(
            ControlSpec(channels=channels, bottleneck=bottleneck, blocks=blocks, widths=(2048,) * len(blocks))
        )
    assert sum(p.numel() for p in made.parameters()) == weights
    assert len(made.state_dict()) == tensors


def test_the_default_blocks_are_the_originals_scaled() -> None:
    assert mirrored_blocks(64) == PUBLISHED
    assert mirrored_blocks(32) == (0, 2, 4, 6, 25, 27, 29, 31)
    assert mirrored_blocks(8) == (0, 1, 6, 7)
    assert mirrored_blocks(1) == (0,)


@pytest.mark.parametrize(("model", "count", "width"), [("c_3b", 64, 2048), ("c_1b", 32, 1536), ("c_tiny", 8, 128)])
def test_every_executed_block_of_a_stage_has_a_width(model: str, count: int, width: int) -> None:
    assert block_widths(make_stage(model).network_config.arguments) == [width] * count


def test_widths_follow_the_levels_and_their_repeats() -> None:
    config = {
        "block_out_channels": [8, 16],
        "down_num_layers_per_block": [1, 2],
        "up_num_layers_per_block": [1, 2],
        "down_blocks_repeat_mappers": [1, 2],
        "up_blocks_repeat_mappers": [3, 1],
    }
    assert block_widths(config) == [8, 16, 16, 16, 16, 16, 16, 16, 8, 8]


@pytest.mark.parametrize("bottleneck", ["simple", "large"])
def test_convolutions_of_the_originals_own_heads_begin_as_torchs(
    bottleneck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlnet, "LARGE_WIDTHS", (96, 48, 80))
    made = build_control_network(spec(channels=64, bottleneck=bottleneck), device=CPU, seed=3)
    found = [module for module in made.backbone.modules() if isinstance(module, nn.Conv2d)]
    assert len(found) == {"simple": 2, "large": 3 + 2 * 8}[bottleneck]
    for convolution in found:
        bound = convolution.weight[0].numel() ** -0.5
        for values in (convolution.weight.detach(), convolution.bias.detach()):
            assert 0.85 * bound < float(values.abs().max()) <= bound
            assert float(values.std() / bound) == pytest.approx(3**-0.5, abs=0.15)


@pytest.mark.parametrize("bottleneck", ["simple", "small"])
def test_first_values_are_silent_and_a_function_of_the_seed(bottleneck: str) -> None:
    one, same, other = (build_control_network(spec(bottleneck=bottleneck), device=CPU, seed=s) for s in (1, 1, 2))
    control = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    assert all(not each.any() for each in one(control).values())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.backbone(control).std() > 1e-2


def test_an_efficientnet_from_a_seed_is_silent_too() -> None:
    made = build_control_network(spec(bottleneck="effnet"), device=CPU, seed=0).train()
    control = torch.rand(1, 1, 35, 66, generator=torch.Generator().manual_seed(0))
    assert all(not each.any() for each in made(control).values())
    assert made.backbone(control).shape == (1, 1280, 2, 2)
    assert made.backbone(control).std() > 1e-3
    assert made.backbone(control[..., :3, :3]).isfinite().all()
    with pytest.raises(ValueError, match="34 x 66 pixels: .* 35 x 35 pixels at least; .*task.bottleneck=simple"):
        made(control[..., :34, :])
    assert made.backbone(control[..., :34, :34]).shape == (1, 1280, 1, 1), "what is refused has no places"


def test_colour_reaches_an_efficientnet_with_padding() -> None:
    made = build_control_network(spec(bottleneck="effnet", channels=3), device=CPU, seed=0)
    assert made.backbone(torch.zeros(1, 3, 33, 33)).shape == (1, 1280, 2, 2)
    made(torch.zeros(1, 3, 33, 33))
    with pytest.raises(ValueError, match="33 x 33 pixels at least"):
        made(torch.zeros(1, 3, 32, 33))


def test_projections_follow_the_order_of_the_blocks() -> None:
    made = audible(build_control_network(spec((5, 0)), device=CPU, seed=0))
    control = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    found, features = made(control), made.backbone(control)
    assert list(found) == [5, 0]
    assert torch.equal(found[5], made.projections[0](features))
    assert torch.equal(found[0], made.projections[1](features))


def test_the_network_stays_in_eval_mode() -> None:
    made = build_control_network(spec(), device=CPU, seed=0).train()
    assert not any(module.training for module in made.modules())
    assert all(parameter.requires_grad for parameter in made.parameters())


def gradients(*, is_compiled: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a prediction under a control map, and the gradient of every weight of the control network."""
    layers = {"down_num_layers_per_block": [1, 1], "up_num_layers_per_block": [1, 1]}
    generator = filled_network(**layers).requires_grad_(requires_grad=False).eval()
    made = audible(build_control_network(spec((0, 2, 3)), device=CPU, seed=0))
    for module in (each for unit in [*generator.units(), *made.units()] for each in unit if is_compiled):
        module.compile(backend="aot_eager")
    control = made(torch.rand(2, 1, 96, 64, generator=torch.Generator().manual_seed(0)))
    pred = generator(**network_inputs(), control=control, return_dict=False)[0]
    pred.square().sum().backward()
    assert all(parameter.grad is None for parameter in generator.parameters())
    return pred.detach(), {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
def test_compilation_changes_neither_output_nor_gradients() -> None:
    (wanted, expected), (pred, found) = gradients(is_compiled=False), gradients(is_compiled=True)
    torch.testing.assert_close(pred, wanted, rtol=1e-5, atol=1e-6)
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_maps_of_another_number_of_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="control map of 3 channels .* takes 1 channels, .*; use the filter"):
        build_control_network(spec(), device=CPU, seed=0)(torch.rand(1, 3, 64, 64))


@pytest.mark.parametrize("bottleneck", ["simple", "small"])
@pytest.mark.parametrize("size", [(1, 1), (33, 47)])
def test_odd_and_smallest_maps_work(bottleneck: str, size: tuple[int, int]) -> None:
    made = build_control_network(spec(bottleneck=bottleneck), device=CPU, seed=0)
    assert made(torch.rand(1, 1, *size))[2].isfinite().all()
