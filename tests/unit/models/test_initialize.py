import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.models import initialize
from cascade_train.models.cascade.family import original_state
from cascade_train.models.formats.lora_files import fill_adapters
from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.initialize import (
    CHUNK,
    DrawnValues,
    Fill,
    Shares,
    fill_,
    initialise,
    materialise,
    name_seed,
    unet_rule,
)
from cascade_train.models.lora import MAGNITUDE, begin_magnitudes, inject_lora
from cascade_train.models.stage import Stage
from tests.unit.models.small_networks import empty_network, small_network
from tests.unit.models.stages import build_stage, tiny_network

CPU = torch.device("cpu")


def initialised() -> nn.Module:
    options = {"effnet_in_channels": 16, "pixel_mapper_in_channels": 3, "switch_level": None}
    config = tiny_network(block_out_channels=[64, 128], **options)
    network = config.build()
    initialise(network, unet_rule(config.residual_blocks), device=CPU, dtype=torch.float32, seed=0)
    return network.requires_grad_(False)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return initialised()


def bound(weight: torch.Tensor) -> float:
    receptive = math.prod(weight.shape[2:])
    return math.sqrt(6 / (receptive * (weight.shape[0] + weight.shape[1])))


def assert_uniform(weight: torch.Tensor, limit: float) -> None:
    weight = weight.detach()
    assert 0.9 * limit < weight.abs().max() <= limit
    assert weight.std() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_outputs_time_mappers_and_response_norms_start_at_zero(network: nn.Module) -> None:
    zero = {name for name, p in network.named_parameters() if not p.any()}
    assert "clf.1.weight" in zero
    weights = {name for name in zero if not name.endswith("bias")}
    kinds = {name.rpartition(".")[0].rpartition(".")[2] + "." + name.rpartition(".")[2] for name in weights}
    assert kinds == {"1.weight", "mapper.weight", "mapper_sca.weight", "mapper_crp.weight", "2.gamma", "2.beta"}
    assert {name for name in weights if name.endswith("1.weight")} == {"clf.1.weight"}


def test_biases_start_at_zero_except_of_strided_transposed_convolutions(network: nn.Module) -> None:
    nonzero = [name for name, p in network.named_parameters() if name.endswith("bias") and p.any()]
    assert nonzero == ["up_upscalers.0.1.bias"]
    fan_in = network.up_upscalers[0][1].weight.shape[1] * 4
    assert_uniform(network.up_upscalers[0][1].weight, 1 / math.sqrt(fan_in))
    assert 0.8 / math.sqrt(fan_in) < network.up_upscalers[0][1].bias.abs().max() <= 1 / math.sqrt(fan_in)


def test_condition_mappers_are_normal_with_the_originals_width(network: nn.Module) -> None:
    for layer in (network.clip_txt_mapper, network.clip_txt_pooled_mapper, network.clip_img_mapper):
        assert layer.weight.std() == pytest.approx(0.02, rel=0.1)
    assert network.effnet_mapper[2].weight.std() == pytest.approx(0.02, rel=0.1)
    assert network.pixels_mapper[0].weight.abs().max() > 0.04


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("embedding.1", 0.02),
        ("down_blocks.0.0.channelwise.0", 1.0),
        ("down_blocks.0.0.channelwise.4", math.sqrt(1 / 3)),  # of three residual blocks
        *((f"down_blocks.0.2.attention.to_{each}", math.sqrt(1 / 2)) for each in "qkv"),  # as one fused matrix
        ("down_blocks.0.2.attention.to_out.0", 1.0),
        ("down_downscalers.1.1", 1.0),
        ("down_blocks.0.2.kv_mapper.1", 1.0),
        ("down_blocks.1.0.depthwise", 1.0),
    ],
)
def test_all_else_is_xavier_with_the_originals_gain(network: nn.Module, name: str, gain: float) -> None:
    weight = network.get_submodule(name).weight
    assert_uniform(weight, gain * bound(weight))


def test_unknown_parameters_are_not_guessed() -> None:
    with pytest.raises(AssertionError, match="no initialisation is known"):
        unet_rule(1)("mystery", nn.Parameter(torch.zeros(2)))


def test_a_value_depends_on_seed_and_name_alone() -> None:
    def draw(seed: int, name: str) -> torch.Tensor:
        torch.rand(3)
        values = torch.empty(1000)
        fill_(values, Fill(kind="normal", scale=1.0), seed, name)
        return values

    assert torch.equal(draw(0, "a"), draw(0, "a"))
    assert not torch.equal(draw(0, "a"), draw(0, "b"))
    assert not torch.equal(draw(0, "a"), draw(1, "a"))
    assert name_seed(0, "embedding.1.weight") == 4497291802309913340


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    fill_(torch.empty(10), Fill(kind="uniform", scale=1.0), 0, "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_bf16_values_are_the_rounded_fp32_values() -> None:
    full, half = torch.empty(5000), torch.empty(5000, dtype=torch.bfloat16)
    for values in (full, half):
        fill_(values, Fill(kind="uniform", scale=0.3), 0, "a")
    assert torch.equal(full.to(torch.bfloat16), half)


def test_large_tensors_are_drawn_in_chunks_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK == 1 << 18
    monkeypatch.setattr(initialize, "CHUNK", 1024)
    values = torch.empty(50, 50)
    fill_(values, Fill(kind="uniform", scale=1.0), 0, "a")
    expected = torch.empty(2500).uniform_(-1, 1, generator=torch.Generator().manual_seed(name_seed(0, "a")))
    assert torch.equal(values.view(-1), expected)


def test_buffers_get_their_start_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    materialise(module, CPU, torch.float32)
    assert module[1].running_mean.tolist() == [0.0] * 4
    assert module[1].running_var.tolist() == [1.0] * 4
    assert module[1].num_batches_tracked == 0


def test_unknown_buffers_are_not_guessed() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2, device="meta"))
    with pytest.raises(AssertionError, match="buffer table: no start value"):
        materialise(module, CPU, torch.float32)


def test_the_number_of_threads_changes_no_value(network):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        values = initialised().state_dict()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(value, values[name]) for name, value in network.state_dict().items())


RULE = unet_rule(3)


def in_three(network: nn.Module) -> Iterator[Shares]:
    """Yield what each of three ranks holds of a network, in memory of its own."""
    wholes = {name: torch.full(p.shape, torch.nan) for name, p in network.named_parameters()}
    parts = {name: whole.chunk(3) for name, whole in wholes.items()}
    for rank in range(3):
        empty = {name: (whole[:0].clone(), len(whole)) for name, whole in wholes.items()}
        here = {name: chunks for name, chunks in parts.items() if rank < len(chunks)}
        yield empty | {name: (chunks[rank].clone(), rank * len(chunks[0])) for name, chunks in here.items()}


def joined(values: DrawnValues | StoredValues, network: nn.Module) -> dict[str, Tensor]:
    ranks = list(in_three(network))
    for shares in ranks:
        values.fill(shares)
    return {name: torch.cat([shares[name][0] for shares in ranks]) for name in ranks[0]}


def assert_equal(found: dict[str, Tensor], expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("total", [5, 3 * 1000, CHUNK, 2 * CHUNK + 30])
def test_parts_of_a_drawn_parameter_are_those_of_the_whole(kind, total):
    fill, whole = Fill(kind=kind, scale=0.5), torch.empty(total)
    fill_(whole, fill, 7, "a.weight")
    for begin, end in ((0, 1), (total // 3, total // 2), (total - 2, total), (total, total)):
        part = torch.empty(end - begin)
        fill_(part, fill, 7, "a.weight", begin=begin, total=total)
        assert torch.equal(part, whole[begin:end])


def test_a_drawn_network_does_not_depend_on_how_it_is_split():
    whole, meta = empty_network(), empty_network()
    initialise(whole, RULE, device=CPU, dtype=torch.float32, seed=4)
    assert_equal(joined(DrawnValues(meta, RULE, seed=4), meta), whole)


@pytest.mark.parametrize("name", ["c.safetensors", "c.pt"])
@pytest.mark.parametrize("rename", [dict, original_state])
def test_a_stored_network_does_not_depend_on_how_it_is_split(
    tmp_path: Path, name: str, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]
):
    network, save = small_network(), save_file if name.endswith("safetensors") else torch.save
    save(rename(network.state_dict()), tmp_path / name)
    meta = empty_network()
    assert_equal(joined(StoredValues(meta, str(tmp_path / name)), meta), network)


def test_magnitudes_on_a_base_without_values_begin_as_on_one_with_values(tmp_path: Path):
    whole, meta = small_network(), empty_network()
    save_file(whole.state_dict(), tmp_path / "c.safetensors")
    values = StoredValues(meta, str(tmp_path / "c.safetensors"))
    for network in (whole, meta):
        filters = ["up_blocks.0.2.attention", "embedding", "upscalers"]
        inject_lora(network, rank=2, alpha=2, dropout=0.0, module_filters=filters, seed=0, dora=True)
    state, pieces = dict(whole.named_parameters()), list(in_three(meta))
    for shares in pieces:
        magnitudes = {name: share for name, share in shares.items() if MAGNITUDE in name}
        assert len(magnitudes) == sum(".lora_magnitude_vector." in name for name in state) > 0
        begin_magnitudes(meta, values.fill, shares)
        for name, (rows, first) in magnitudes.items():
            assert torch.equal(rows, state[name][first : first + len(rows)])


def test_stored_magnitudes_take_the_place_of_those_without_values():
    meta = empty_network()
    inject_lora(meta, rank=2, alpha=2, dropout=0.0, module_filters=[".attn"], seed=0, dora=True)
    names = [name for name, _ in meta.named_parameters() if ".lora_" in name]
    state = {name.replace(".default.", "."): torch.ones(meta.get_parameter(name).shape) for name in names}
    fill_adapters(meta, state, "a")
    assert all(torch.equal(meta.get_parameter(name), torch.ones(meta.get_parameter(name).shape)) for name in names)
    assert all(meta.get_parameter(name).requires_grad for name in names)


def test_a_stage_whose_build_leaves_nothing_open_refuses_open_parameters():
    stage = build_stage("c_tiny")
    Stage.fill(stage, {})
    with pytest.raises(AssertionError, match=r"stage_c has no values for a\.weight"):
        Stage.fill(stage, {"a.weight": (torch.empty(1), 0)})
