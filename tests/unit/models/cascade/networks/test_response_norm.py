"""The fused operator computes what its parts compute, and keeps less."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_stable_cascade import GlobalResponseNorm, SDCascadeResBlock
from torch import Tensor, nn

from cascade_train.models.cascade.networks import response_norm as module
from cascade_train.models.cascade.networks.response_norm import FusedChannelwise, response_norm, set_kernels
from tests.unit.launches import Launches
from tests.unit.models.stages import filled_network, network_inputs

CHANNELS = 24


def inputs(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 5, CHANNELS)) -> tuple[Tensor, ...]:
    """h, gamma and beta with gradients, and the gradient of the output; channel 0 holds negative zeros."""
    generator = torch.Generator().manual_seed(3)
    h, gamma, beta, grad = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in (shape, (1, 1, 1, shape[-1]), (1, 1, 1, shape[-1]), shape)
    )
    h[..., 0], beta[..., 0] = -60.0, -0.0
    return *(x.to(dtype).requires_grad_() for x in (h, gamma, beta)), grad.to(dtype)


def one_by_one(h: Tensor, gamma: Tensor, beta: Tensor, p: float) -> Tensor:
    norm = GlobalResponseNorm(h.shape[-1])
    del norm.gamma, norm.beta
    norm.gamma, norm.beta = gamma, beta
    return nn.functional.dropout(norm(nn.functional.gelu(h)), p)


def measured(
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    p: float,
    shape: tuple[int, ...] = (3, 4, 5, CHANNELS),
    rounded: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Output and gradients, in float64, of inputs that `rounded` represents."""
    *arguments, grad = (x.detach().to(dtype) for x in inputs(rounded, shape))
    arguments = [x.requires_grad_() for x in arguments]
    torch.manual_seed(1)
    out = function(*arguments, p)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, arguments, grad))]


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_equals_its_parts_one_by_one(dtype: torch.dtype, most: float, p: float) -> None:
    expected = measured(one_by_one, torch.float64, p)
    for got, wanted in zip(measured(response_norm, dtype, p), expected, strict=True):
        assert error(got, wanted) < most


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_its_gradients_are_those_of_its_values(p: float) -> None:
    def seeded(*arguments: Tensor) -> Tensor:
        torch.manual_seed(2)
        return response_norm(*arguments, p)

    assert torch.autograd.gradcheck(seeded, inputs(torch.float64, (2, 2, 3, 5))[:3])


def test_a_sample_without_activation_has_finite_gradients() -> None:
    h, gamma, beta, grad = inputs(torch.float64)
    gradients = torch.autograd.grad(response_norm(h * 0, gamma, beta), (h, gamma, beta), grad)
    assert all(bool(each.isfinite().all()) for each in gradients)


def kept_units(kernels: str, dropout: float) -> float:
    """What one residual block keeps for backward, in tensors of its own size, without parameters."""
    block = SDCascadeResBlock(8, dropout=dropout)
    set_kernels(block, kernels)  # type: ignore[arg-type]
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() >= x.numel() and (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x)
    return sum(tensor.nbytes for tensor in kept.values()) / x.nbytes


def test_a_residual_block_keeps_11_units_where_its_parts_keep_19() -> None:
    assert kept_units("eager", 0.0) == 19
    assert kept_units("fused", 0.0) == 11
    assert kept_units("fused", 0.1) == 11


def test_a_network_has_the_same_names_and_numbers_with_either() -> None:
    network = filled_network(dropout=[0.2, 0.2]).train()
    names, outputs = list(network.state_dict()), []
    for kernels in ("eager", "fused", "eager"):
        set_kernels(network, kernels)  # type: ignore[arg-type]
        assert list(network.state_dict()) == names
        torch.manual_seed(4)
        outputs.append(network(**network_inputs(), return_dict=False)[0])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


def test_recomputation_replays_its_dropout() -> None:
    network, results = filled_network(dropout=[0.5, 0.5]).train(), []
    set_kernels(network, "fused")
    for enabled in (False, True):
        network.gradient_checkpointing = enabled
        torch.manual_seed(7)
        loss = network(**network_inputs(), return_dict=False)[0].square().sum()
        results.append(torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_compiles_as_one_graph(p: float) -> None:
    layers = nn.Linear(6, CHANNELS), nn.GELU(), GlobalResponseNorm(CHANNELS), nn.Dropout(p), nn.Linear(CHANNELS, 6)
    plain = FusedChannelwise(*layers)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    results = []
    for run in (plain, compiled):
        torch.manual_seed(5)
        out = run(torch.ones(2, 3, 4, 6))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(plain.parameters()))])
    torch.testing.assert_close(*results)


SHAPES = [(3, 4, 5, CHANNELS), (1, 9, 8, 100), (2, 1, 1, 40), (2, 1, 2, 2100)]
"""One tile, several of odd widths of one sample, one position, and more channels than a program reads at once."""


def check_kernels() -> None:
    """Compare the Triton kernels with torch, where triton's interpreter runs them on the host."""
    from cascade_train.models.cascade.networks import response_norm_triton as kernels

    assert SHAPES[-1][-1] > kernels.CHUNK
    for shape, p in itertools.product(SHAPES, (0.0, 0.3)):
        for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            expected = measured(response_norm, torch.float64, p, shape, dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_kernels", lambda _: kernels)
                results = measured(response_norm, dtype, p, shape)
            for got, wanted in zip(results, expected, strict=True):
                assert error(got, wanted) < most, (shape, p, dtype)
    check_channels_without_activation(kernels)


@torch.no_grad()
def check_channels_without_activation(kernels: ModuleType) -> None:
    """One sample is all zeros, and one channel of the other."""
    h, gamma, beta, grad = inputs(torch.float32)
    h[0], h[1:, ..., 2] = 0.0, 0.0
    results = []
    for chosen in (None, kernels):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_kernels", lambda _, chosen=chosen: chosen)
            out, norm = module._forward(h, gamma, beta, 0.0)
            results.append([out, norm, *module._backward(grad, h, None, gamma, norm, 0.0)])
    assert not results[1][1][0].any()
    assert not results[1][1][..., 2].any()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_compute_what_torch_computes() -> None:
    code = "from tests.unit.models.cascade.networks.test_response_norm import check_kernels; check_kernels()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # to be set before triton is imported
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_kernels_launch_four_times_each_way(monkeypatch, p: float, dtype: torch.dtype) -> None:
    from cascade_train.models.cascade.networks import response_norm_triton as kernels

    *arguments, grad = inputs(dtype)
    launches = Launches(response_norm=module._forward, response_norm_backward=module._backward)
    monkeypatch.setattr(kernels, "_run", lambda kernel, *_, **__: launches.names.append(kernel.__name__))
    monkeypatch.setattr(module, "_kernels", lambda _: kernels)
    with launches:
        out = response_norm(*arguments, p)
        forward, launches.names = launches.names, []
        torch.autograd.grad(out, arguments, grad)
    assert forward == ["bernoulli_"] * (p > 0) + ["_square_sums", "sum", "_norms", "_apply"]
    assert launches.names == ["_gradient_sums", "sum", "_slopes", "_apply_backward"]


KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int16: "*i16", torch.bool: "*i1"}


@contextmanager
def compiled_only(capability: int) -> Iterator[list[Any]]:
    """Let launches compile their kernel for a device that is not there; yields what was compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cascade_train.models.cascade.networks import response_norm_triton as kernels

    def kind(argument: Tensor | float) -> str:
        if isinstance(argument, Tensor):
            return KINDS[argument.dtype]
        return "fp32" if isinstance(argument, float) else "constexpr" if argument == 1 else "i32"  # as triton does

    compiled: list[Any] = []

    def run(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float, **flags: int) -> None:
        signature = dict(zip(kernel.arg_names, [*map(kind, arguments), *["constexpr"] * len(flags)], strict=True))
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | flags
        constants = {name: value for name, value in values.items() if signature[name] == "constexpr"}
        even = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor) or argument % 16 == 0]
        attributes = {(place,): [["tt.divisibility", 16]] for place in even}  # as a launch marks them
        source = ASTSource(kernel, signature, constants, attributes)
        compiled.append(triton.compile(source, target=GPUTarget("cuda", capability, 32)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_run", run)
        patch.setattr(module, "_kernels", lambda _: kernels)
        yield compiled


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore")  # triton warns about its own defaults
@pytest.mark.parametrize(
    ("capability", "p", "shape"),
    [*((each, 0.3, SHAPES[0]) for each in (80, 90, 100)), *((90, 0.0, each) for each in (SHAPES[0], (1, 1, 1, 1)))],
)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(monkeypatch, tmp_path, capability, p, shape) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiled_only(capability) as made:
        measured(response_norm, torch.bfloat16, p, shape)
    assert all(each.asm["cubin"] for each in made)
    compiled = {each.name for each in made}
    assert compiled == {"_square_sums", "_norms", "_apply", "_gradient_sums", "_slopes", "_apply_backward"}
