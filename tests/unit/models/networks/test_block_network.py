"""Attention kernels, and dropout on probabilities against torch's MultiheadAttention, which the original uses."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.networks.block_network import drop_probabilities, set_attention
from tests.unit.models.stages import filled_network, network_inputs

WIDTH, HEADS, P = 32, 4, 0.5


@pytest.fixture(scope="module")
def network() -> CascadeUNet:
    return filled_network(dropout=[0.5, 0.5]).eval()


def predict(network: CascadeUNet) -> Tensor:
    return network(**network_inputs(), return_dict=False)[0]


def kernels(network: CascadeUNet) -> set[str]:
    return {type(unit[2].attention.processor).__name__ for unit in network.units()}


def pair() -> tuple[nn.MultiheadAttention, nn.Sequential]:
    """Return torch's attention and a network that holds diffusers' with the same weights."""
    torch.manual_seed(0)
    original = nn.MultiheadAttention(WIDTH, HEADS, dropout=P, bias=True, batch_first=True)
    nn.init.normal_(original.in_proj_bias)
    ours = Attention(query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, dropout=P, bias=True)
    fused = (original.in_proj_weight.chunk(3), original.in_proj_bias.chunk(3))
    for linear, weight, bias in zip((ours.to_q, ours.to_k, ours.to_v), *fused, strict=True):
        linear.load_state_dict({"weight": weight, "bias": bias})
    ours.to_out[0].load_state_dict(original.out_proj.state_dict())
    network = nn.Sequential(ours)
    drop_probabilities(network)
    return original, network


@pytest.mark.parametrize("kernel", ["sdpa", "math"])
@pytest.mark.parametrize("training", [True, False])
def test_dropped_probabilities_are_the_originals_draw_for_draw(kernel: str, training: bool) -> None:
    original, network = pair()
    set_attention(network, kernel)
    original.train(training)
    network.train(training)
    latent, tokens = torch.randn(2, WIDTH, 3, 5), torch.randn(2, 7, WIDTH)
    query = latent.flatten(2).transpose(1, 2)
    torch.manual_seed(3)
    expected = original(query, tokens, tokens, need_weights=kernel == "math")[0]
    torch.manual_seed(3)
    got = network[0](latent, encoder_hidden_states=tokens)
    torch.testing.assert_close(got.flatten(2).transpose(1, 2), expected, atol=1e-6, rtol=1e-5)


def test_the_output_itself_is_not_dropped() -> None:
    _, network = pair()
    network.train()
    out = network[0](torch.randn(2, WIDTH, 3, 5), encoder_hidden_states=torch.randn(2, 7, WIDTH))
    assert (out != 0).all()


def test_where_dropout_acts_changes_training_alone(network: CascadeUNet) -> None:
    elsewhere = filled_network(dropout=[0.5, 0.5], attention_dropout="output").eval()
    elsewhere.load_state_dict(network.state_dict())
    assert torch.equal(predict(elsewhere), predict(network))
    results = []
    for each in (network, elsewhere):
        torch.manual_seed(1)
        results.append(predict(each.train()))
        each.eval()
    assert not torch.allclose(*results)


def test_a_chosen_kernel_reaches_every_block() -> None:
    network = filled_network(attention_dropout="output")
    network.set_attention("math")
    assert kernels(network) == {"AttnProcessor"}
    network.set_attention("sdpa")
    assert kernels(network) == {"AttnProcessor2_0"}
    assert kernels(filled_network()) == {"ProbabilityDropout"}


def test_a_kernel_that_is_not_there_is_refused(network: CascadeUNet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attention=flash: must be one of sdpa, xformers, math"):
        network.set_attention("flash")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ConfigError, match=r"the package xformers is not installed.*--editable '\.\[xformers\]'"):
        network.set_attention("xformers")
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ModuleType("xformers.ops"))
    with pytest.raises(ConfigError, match="attention=xformers: needs a CUDA device.*use attention=sdpa"):
        network.set_attention("xformers")


def test_optional_packages_that_cannot_be_loaded_end_no_run(tmp_path):
    """A default run asks for neither; `attention=xformers` names the cause."""
    for name in ("xformers", "bitsandbytes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0"
        )
    program = """
from cascade_train.models.networks import block_network
import diffusers.loaders.single_file_model, peft, torch
peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"]), torch.nn.Sequential(torch.nn.Linear(2, 2)))
try:
    block_network.set_attention(torch.nn.Linear(2, 2), "xformers")
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "xformers is installed but cannot be loaded: undefined symbol" in done.stdout
