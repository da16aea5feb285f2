"""A network that is filled in parts has, bit for bit, the values of one that is filled whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.models.formats.lora_files import fill_adapters
from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.initial_values import FirstValues, Shares
from cascade_train.models.initialize import CHUNK, DrawnValues, Fill, fill_, fill_part_, initialise, unet_rule
from cascade_train.models.lora import begin_magnitudes, inject_lora, split_magnitudes
from cascade_train.models.stage import Stage
from tests.unit.models.networks import empty_network, original_state, small_network
from tests.unit.models.stages import build_stage

CPU = torch.device("cpu")
RULE = unet_rule(3)


def in_three(network: nn.Module) -> Iterator[Shares]:
    """Yield what each of three ranks holds of a network, in memory of its own."""
    wholes = {name: torch.full(p.shape, torch.nan) for name, p in network.named_parameters()}
    parts = {name: whole.chunk(3) for name, whole in wholes.items()}
    for rank in range(3):
        mine = {
            name: (chunks[rank].clone(), rank * len(chunks[0])) for name, chunks in parts.items() if rank < len(chunks)
        }
        rest = {
            name: (torch.empty(0, *wholes[name].shape[1:]), len(wholes[name])) for name in wholes if name not in mine
        }
        yield mine | rest


def joined(values: FirstValues, network: nn.Module) -> dict[str, Tensor]:
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
        fill_part_(part, fill, 7, "a.weight", begin=begin, total=total)
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


@pytest.mark.parametrize("module_filters", [[".attn"], None])
def test_magnitudes_on_a_base_without_values_begin_as_on_one_with_values(tmp_path: Path, module_filters):
    whole, meta = small_network(), empty_network()
    save_file(whole.state_dict(), tmp_path / "c.safetensors")
    values = StoredValues(meta, str(tmp_path / "c.safetensors"))
    for network in (whole, meta):
        inject_lora(network, rank=2, alpha=2, dropout=0.0, module_filters=module_filters, seed=0, dora=True)
    state, pieces = dict(whole.named_parameters()), list(in_three(meta))
    for shares in pieces:
        magnitudes, _ = split_magnitudes(shares)
        assert len(magnitudes) == sum(".lora_magnitude_vector." in name for name in state) > 0
        begin_magnitudes(meta, values, magnitudes)
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
