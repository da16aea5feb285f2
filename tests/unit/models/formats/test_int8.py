"""A frozen network in 8 bits: how near it is, that gradients go through it, and that adapters train on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.model import build_modules, fill, quantize_base
from cascade_train.assembly.planning.memory import memory_of
from cascade_train.errors import ConfigError
from cascade_train.models.formats.int8 import BLOCK, Int8Linear, decode, encode, fill_codes, quantize
from tests.integration.runs import NARROW, cut_back, read_metrics, train
from tests.unit.config.composing import checked

CPU = torch.device("cpu")


@pytest.mark.parametrize(("inputs", "blocks"), [(3 * BLOCK, 3), (BLOCK + 1, 1), (1, 1)])
def test_a_weight_is_within_half_a_step_of_what_its_codes_stand_for(inputs: int, blocks: int):
    sizes = torch.tensor([[1e-3], [1], [9], [0], [2]])
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0)) * sizes
    codes, scales = encode(weight, torch.float32)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, weight.shape, (5, blocks))
    step = scales.repeat_interleave(inputs // blocks, dim=1)
    assert ((decode(codes, scales, torch.float32) - weight).abs() <= 0.501 * step).all()
    assert codes.min() >= -127
    again, _ = encode(decode(codes, scales, torch.float32), torch.float32)
    assert torch.equal(again, codes)


def test_rows_are_encoded_alike_however_they_are_divided():
    weight = torch.randn(7, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    parts = [encode(part, torch.bfloat16) for part in weight.split([4, 3])]
    for whole, divided in zip(encode(weight, torch.bfloat16), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(divided))


def test_a_layer_keeps_no_weight_for_backward_and_gives_its_gradient():
    torch.manual_seed(0)
    plain = nn.Linear(BLOCK, 6).requires_grad_(False)
    network = nn.Sequential(plain, nn.ReLU(), nn.Linear(6, 3))
    assert quantize([network]) == 1, "the second trains"
    layer = network[0]
    assert isinstance(layer, Int8Linear)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "weight_scale", "bias"]
    weight, x = decode(layer.weight, layer.weight_scale, torch.float32), torch.randn(2, BLOCK, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    assert {tensor.dtype for tensor in kept if tensor.shape == weight.shape} == {torch.int8}
    torch.testing.assert_close(output, nn.functional.linear(x, weight, plain.bias))
    gradient = torch.randn(2, 6)
    assert torch.equal(torch.autograd.grad(output, x, gradient)[0], gradient @ weight)


def test_values_are_filled_through_fp32_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cascade_train.models.formats.int8.AT_ONCE", 20)
    with torch.device("meta"):
        network = nn.Sequential(*(nn.Linear(4, 3).requires_grad_(False) for _ in range(3)), nn.LayerNorm(3))
    quantize([network])
    shares = {name: (torch.zeros(p.shape, dtype=p.dtype), 0) for name, p in network.named_parameters()}
    asked: list[set[str]] = []

    def fill_ones(given) -> None:
        asked.append({name for name in given if name.endswith(".weight")})
        for rows, _ in given.values():
            assert rows.dtype == torch.float32
            rows.fill_(1.0)

    fill_codes(fill_ones, shares)
    assert asked == [{"3.weight"}, {"0.weight"}, {"1.weight"}, {"2.weight"}]
    assert all((shares[f"{n}.weight"][0] == 127).all() for n in range(3))
    assert shares["1.weight_scale"][0].flatten().tolist() == pytest.approx([1 / 127] * 3)


def prediction(*overrides: str) -> torch.Tensor:
    """Return what the packaged Stage C predicts on a fixed input below new adapters."""
    cfg = checked("model=c_tiny", "task=lora", *overrides)
    parts = build_parts(cfg)
    build_modules(cfg, parts, CPU, network_dtype=torch.float32)
    quantize_base(cfg, parts)
    fill(parts.stage, CPU)
    generator = torch.Generator().manual_seed(0)
    noised = torch.randn(2, *parts.stage.latent_shape(96, 96), generator=generator)
    cond = parts.stage.conditions(parts.stage.tokenize(["a red circle", "a green square"]))
    with torch.no_grad():
        return parts.stage.predict(noised, torch.tensor([0.3, 0.7]), cond)


def test_the_packaged_network_predicts_nearly_the_same(world):
    exact, found = prediction(), prediction("train.base_weights=int8")
    error = (found - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task=finetune"], r"train\.base_weights=int8 is for a frozen network.* Set it to null"),
        (["task=lora", "task.dora=true"], r"task\.dora=true takes the lengths .* or task\.dora=false"),
    ],
)
def test_what_has_no_frozen_weights_is_refused(changes: list[str], message: str):
    cfg = checked("model=c_tiny", *changes, "train.base_weights=int8")
    parts = build_parts(cfg)
    build_modules(cfg, parts, torch.device("meta"), network_dtype=torch.float32)
    with pytest.raises(ConfigError, match=message):
        quantize_base(cfg, parts)


@pytest.mark.slow
@pytest.mark.parametrize("task", [("task=lora",), ("task=controlnet", "task.bottleneck=small")])
def test_a_run_on_codes_resumes_to_the_bit(task: tuple[str, ...], tmp_path: Path):
    own = (*task, "train.precision=bf16", "train.base_weights=int8", "optimizer.lr=1e-3")
    run = train(tmp_path / "run", *NARROW, *own)
    copy = cut_back(run, tmp_path / "copy", 2)
    train(copy, *NARROW, *own)
    assert read_metrics(copy) == read_metrics(run)
    checkpoint = b"".join(file.read_bytes() for file in (run / "checkpoints/step_4").iterdir())
    assert b".weight" in checkpoint
    assert b"weight_scale" not in checkpoint, "the base is made anew"
    exported = next((run / "export").rglob("*.safetensors"))
    assert {value.dtype for value in load_file(exported).values()} == {torch.float32}


def test_a_plan_counts_codes():
    cfg = checked("model=c_tiny", "task=lora", "data=shapes", "train.global_batch_size=1", "train.precision=bf16")
    whole, _ = memory_of(cfg)
    cfg.train.base_weights = "int8"
    small, steps = memory_of(cfg)
    weights = whole.peak(1)["weights"] - small.peak(1)["weights"]
    assert 0.6 < weights / steps.parameters["network"][0] < 1.0, "of two bytes each, nearly one is left"
