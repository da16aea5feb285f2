"""Units compile once for all buckets, and the end of that is an error with advice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shapes

from cascade_train.data.buckets import Buckets
from cascade_train.distributed.parallelize import compile_units_of
from cascade_train.errors import RunError
from cascade_train.models.cascade.networks.response_norm import set_kernels
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.stable_diffusion.networks.unet import ConditionUNet
from tests.unit.models.stages import filled_network, network_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with config.patch(recompile_limit=64, fail_on_recompile_limit_hit=False), shapes.patch(use_duck_shape=True):
        yield


def small_network() -> CascadeUNet:
    network: CascadeUNet = filled_network(dropout=[0.1, 0.1])
    set_kernels(network, "fused")
    return network.train()


def predict(network: CascadeUNet, batch: int, height: int, width: int) -> Tensor:
    torch.manual_seed(0)
    inputs = network_inputs(batch) | {"sample": torch.randn(batch, 16, height, width)}
    prediction: Tensor = network(**inputs, return_dict=False)[0]
    return prediction


def sd_network() -> ConditionUNet:
    torch.manual_seed(0)
    network: ConditionUNet = ConditionUNet(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=[32, 64], layers_per_block=1,
        down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"], up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
        attention_head_dim=[2, 4], cross_attention_dim=32, norm_num_groups=8,
    )  # fmt: skip
    return network


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def bucket_sides() -> list[tuple[int, int]]:
    """Height and width of the latents of all buckets of Stage C at 768 px."""
    table = Buckets().table(768, "wide")
    return [(height // 32, width // 32) for height, width in table.sizes_K2.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("each_block", [False, True])
def test_the_graphs_of_one_bucket_serve_for_all_and_other_calls_are_within_the_limit(each_block: bool) -> None:
    shapes.use_duck_shape = False  # as compile_units_of does
    network, sides = small_network(), bucket_sides()
    limit = network.compile_units(each_block=each_block, backend="eager")
    expected = 4 if each_block else 2
    assert len(sides) > 20
    predict(network, 2, *sides[0]).sum().backward()
    for height, width in sides:
        predict(network, 2, height, width)
        assert graphs() == expected, "with and without skip"
    predict(network, 3, *sides[0])
    assert graphs() == expected, "a last batch"
    assert not counters["graph_break"]
    if each_block:
        return  # blocks are shared by fewer kinds of calls than units
    for batch, side in ((2, 4), (1, 4), (16, 4), (2, 1)):
        for training in (True, False):
            with torch.set_grad_enabled(training):
                predict(network.train(training), batch, side, side)
    assert expected < graphs() <= limit


@pytest.mark.slow
def test_the_graphs_of_the_square_bucket_serve_for_all_of_stable_diffusion(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled(self, backend="eager", **options))
    network = sd_network().train()
    compile_units_of(network, network.units(), has_hooks=False, fallback=False)
    sides = [(height // 16, width // 16) for height, width in Buckets().table(256, "wide").sizes_K2.tolist()]
    assert sides[0] == (16, 16)
    seen = []
    for height, width in sides:
        inputs = (torch.randn(2, 4, height, width), torch.rand(2) * 999, torch.randn(2, 24, 32))
        network(*inputs).sum().backward()
        seen.append(graphs())
    assert len(set(sides)) > 5
    assert seen == [seen[0]] * len(sides), "each kind of residual block, transformer and sampler once"
    assert seen[0] < config.recompile_limit


@pytest.mark.slow
def test_a_compiled_network_computes_what_a_plain_one_does() -> None:
    """Unit by unit and recomputed; block by block, as FSDP2 needs it: tests/distributed/test_modes.py."""
    results = []
    for compiled in (False, True):
        network = small_network()
        network.gradient_checkpointing = True
        if compiled:
            network.compile_units(backend="aot_eager")
        loss = predict(network, 2, 3, 5).square().sum()
        results.append([loss, *torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class Branches(nn.Module):
    """Compiles anew for each number it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.inner(x) if name else x
        return y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Branches()

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.unit(x, name)
        return y


@pytest.mark.parametrize("fallback", [False, True])
def test_the_limit_ends_the_run_unless_allowed(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled(self, backend="eager", **options))
    root = Outer()
    config.recompile_limit = 3
    compile_units_of(root, [[root.unit]], has_hooks=False, fallback=fallback)
    for number in range(config.recompile_limit):
        root(torch.ones(1, 2), str(number))
    if fallback:
        assert root(torch.ones(1, 2), "more").shape == (1, 2)
    else:
        with pytest.raises(RunError, match=r"compile=regional: the network needs more graphs.*compile_fallback=true"):
            root(torch.ones(1, 2), "more")
