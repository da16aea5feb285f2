"""Adapters go where the filters say, start as the base, train in fp32 alone, and merge into the base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.lora import (
    ADAPTER,
    StoredLora,
    adapted_layers,
    adapter_state,
    inject_lora,
    lora_spec,
    select_modules,
)
from tests.unit.models.small_networks import empty_network, merge_into, predict, small_network


def inject(network: nn.Module, module_filters: list[str] | None = None, **changes: Any) -> list[str]:
    arguments = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "seed": 0} | changes
    return inject_lora(network, module_filters=[".attn"] if module_filters is None else module_filters, **arguments)


def merge(network: CascadeUNet) -> CascadeUNet:
    """Return another base with the adapters of `network` in its weights."""
    base = small_network()
    lora = StoredLora(spec=lora_spec(network), state=adapter_state(network.state_dict()))
    merge_into(base, lora)
    return base


@pytest.fixture
def network() -> CascadeUNet:
    return small_network()


@pytest.mark.parametrize(
    ("module_filters", "endings", "count"),
    [
        ([".attn"], {"to_q", "to_k", "to_v", "to_out.0"}, 6 * 4),
        (["attention.attn.out_proj"], {"to_out.0"}, 6),
        (["in_proj"], {"to_q", "to_k", "to_v"}, 6 * 3),
        (["to_q"], {"to_q"}, 6),
        ([".channelwise"], {"channelwise.0", "channelwise.4"}, 6 * 2),
        ([".kv_mapper"], {"kv_mapper.1"}, 6),
        ([".attn", ".kv_mapper"], {"to_q", "to_k", "to_v", "to_out.0", "kv_mapper.1"}, 6 * 5),
        ([r"^up_blocks\.1\..*to_(q|v)$"], {"to_q", "to_v"}, 2),
        (["down_blocks.0", "embedding"], {"embedding.1", "mapper", "mapper_sca"}, 11),
        (None, {"clf.1", "embedding.1", "clip_txt_mapper", "up_upscalers.0.1.blocks.1"}, 67),
    ],
)
def test_filters_select_by_diffusers_and_original_names(
    module_filters: list[str] | None, endings: set[str], count: int
) -> None:
    chosen = select_modules(empty_network(), module_filters)
    assert len(chosen) == count
    assert all(any(name.endswith(ending) for name in chosen) for ending in endings)
    assert not any("depthwise" in name for name in chosen)
    assert chosen == [name for name, _ in empty_network().named_modules() if name in set(chosen)]


@pytest.mark.parametrize(
    ("module_filters", "message"),
    [
        ([".attn", ".atention"], "'.atention' selects no linear or ungrouped convolution layer; near: attention"),
        ([".depthwise"], "'.depthwise' selects no linear or ungrouped convolution"),
        (["(unclosed"], "unclosed' selects no"),
        pytest.param([r"^(.|.|.|.)+[^\w.]"], r"selects no", marks=pytest.mark.timeout(20), id="takes for ever"),
        (["zzzz"], "modules are named like"),
        ([], r"module_filters=\[\]: selects no module"),
    ],
)
def test_a_filter_that_selects_nothing_is_refused_with_near_names(module_filters: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_modules(empty_network(), module_filters)


def test_the_originals_first_values_learn_faster_by_the_root_of_thrice_the_width() -> None:
    moved = {}
    for init in ("kaiming", "original"):
        network = small_network()
        inject(network, [".attn"], init=init, alpha=1.0, rank=4)
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-4)
        predict(network).square().mean().backward()
        optimizer.step()
        layers = [layer for _, layer in adapted_layers(network)]
        moved[init] = torch.stack([layer.get_delta_weight(ADAPTER).detach().norm() for layer in layers])
    expected = torch.tensor([(3 * layer.in_features) ** 0.5 for layer in layers])
    assert float((moved["original"] / moved["kaiming"] / expected).median()) == pytest.approx(1.0, abs=0.1)


def test_first_values_depend_on_seed_and_name_alone(network: CascadeUNet) -> None:
    other, third = small_network(seed=5), small_network()
    torch.manual_seed(1)
    inject(network, [".attn"])
    torch.manual_seed(2)
    inject(other, [".channelwise", ".attn"])
    inject(third, [".attn"], seed=1)
    ours, theirs, reseeded = (adapter_state(each.state_dict()) for each in (network, other, third))
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    downs = [name for name in ours if "lora_A" in name]
    assert not any(torch.equal(ours[name], reseeded[name]) for name in downs)
    assert not torch.equal(ours[downs[0]], ours[downs[1]])
    assert all(value.eq(0).all() == ("lora_B" in name) for name, value in ours.items())
    spread = torch.cat([ours[name].flatten() for name in downs])
    assert spread.abs().max() <= 32**-0.5
    assert spread.std() == pytest.approx(32**-0.5 / 3**0.5, rel=0.1)


def test_adapter_dropout_acts_in_train_mode_alone(network: CascadeUNet) -> None:
    inject(network, ["clip_txt_mapper"], dropout=0.5)
    layer, x = network.clip_txt_mapper, torch.ones(1, 24)
    layer.lora_B[ADAPTER].weight.data.fill_(1.0)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("module_filters", [[".attn"], ["embedding", "clf", "mapper", "upscalers"]])
def test_decomposed_weights_begin_as_the_base_train_their_magnitudes_and_merge(
    network: CascadeUNet, module_filters: list[str]
) -> None:
    base = predict(network)
    targets = inject(network, module_filters, dora=True)
    torch.testing.assert_close(predict(network), base, atol=1e-6, rtol=1e-5)
    assert lora_spec(network).dora
    state = adapter_state(network.state_dict())
    assert {name for name in state if "magnitude" in name} == {f"{n}.lora_magnitude_vector.weight" for n in targets}
    predict(network).square().mean().backward()
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert len(trainable) == 3 * len(targets)
    assert all(parameter.dtype == torch.float32 and parameter.grad is not None for parameter in trainable)
    for _, layer in adapted_layers(network):
        torch.nn.init.normal_(layer.lora_B[ADAPTER].weight, std=0.1, generator=torch.Generator().manual_seed(1))
        layer.lora_magnitude_vector[ADAPTER].weight.data.mul_(1.2)
    adapted = predict(network)
    assert not torch.allclose(adapted, base, atol=1e-3)
    torch.testing.assert_close(predict(merge(network)), adapted, atol=1e-5, rtol=1e-4)


def test_a_network_without_adapters_has_no_spec(network: CascadeUNet) -> None:
    with pytest.raises(AssertionError, match="carries no adapters"):
        lora_spec(network)
