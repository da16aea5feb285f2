"""Each kind of adapters changes weights as its paper and its program say, and comes through every file unchanged."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.adapters import lokr
from cascade_train.models.adapters.kinds import KINDS, by_module
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export import build_plain_network, fixed_prediction
from cascade_train.models.formats.export_lora import export_lora, lora_error, save_lora
from cascade_train.models.formats.lora_files import adapter_size, holds_lora, module_shapes, read_lora, refill_lora
from cascade_train.models.lora import (
    ADAPTER,
    adapted_layers,
    adapter_state,
    inject_lora,
    layer_parts,
    lora_spec,
    without_adapters,
)
from tests.unit.models.small_networks import SMALL_B, adapted, load_lora, merge_into, predict, small_network, stored
from tests.unit.models.test_lora_formats import RANKS

predicted = partial(fixed_prediction, CASCADE)
read_from = partial(read_lora, key="from", family=CASCADE)
FILTERS = [".attn", "embedding", "channelwise"]
"""Linear layers of widths 32 and 128, and a convolution of one pixel."""

ON = {"module_filters": FILTERS}
NEW: dict[str, Any] = {"rank": 2, "alpha": 3.0, "dropout": 0.0, "seed": 0, **ON}

LORAS = [
    pytest.param({}, id="lora"),
    pytest.param({"ranks": RANKS}, id="lora of several ranks"),
]
DORA = pytest.param({"dora": True}, id="dora")
OTHERS = [
    pytest.param({"kind": "lokr"}, id="lokr"),
    pytest.param({"kind": "lokr", "factor": 4}, id="lokr of factor 4"),
    pytest.param({"kind": "lokr", "rank": 4}, id="lokr with some whole matrices"),
    pytest.param({"kind": "lokr", "rank": 50}, id="lokr of whole matrices alone"),
    pytest.param({"kind": "loha"}, id="loha"),
    pytest.param({"kind": "loha", "ranks": [["to_q", 1], ["embedding", 4]]}, id="loha of several ranks"),
]


def kronecker(first: Tensor, second: Tensor) -> Tensor:
    """Return the Kronecker product by its definition: block (i, j) is first[i, j] times the second matrix."""
    return torch.cat([torch.cat([value * second for value in row], 1) for row in first])


def by_the_paper(kind: str, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return (out, in * kernel): LoRA (Hu et al. 2021), LyCORIS (Yeh et al. 2024, equations 4 and 6)."""
    if kind == "lora":
        return scale * parts["lora_B.weight"].flatten(1) @ parts["lora_A.weight"].flatten(1)
    if kind == "loha":
        products = (parts[f"hada_w{n}_a"] @ parts[f"hada_w{n}_b"] for n in (1, 2))
        return scale * torch.stack([*products]).prod(0)
    whole = parts.get("lokr_w2")
    second = parts["lokr_w2_a"] @ parts["lokr_w2_b"] if whole is None else whole.flatten(1)
    return scale * kronecker(parts["lokr_w1"], second)


@pytest.mark.parametrize("changes", [*LORAS, *OTHERS])
def test_weights_change_as_the_paper_says(changes: dict[str, Any]) -> None:
    network, base, plain = adapted(**ON | changes), predicted(small_network()), small_network()
    lora, kind = stored(network), changes.get("kind", "lora")
    assert lora.spec.kind == kind
    for name, parts in by_module(lora.state).items():
        weight = plain.get_parameter(f"{name}.weight")
        weight.data += by_the_paper(kind, parts, lora.spec.of(name).scale).view(weight.shape)
    torch.testing.assert_close(predicted(network), predicted(plain), atol=1e-5, rtol=1e-4)
    assert (predicted(network) - base).abs().max() > 0.1
    merged = small_network()
    merge_into(merged, lora)
    torch.testing.assert_close(predicted(merged), predicted(plain), atol=1e-5, rtol=1e-4)
    with without_adapters([network]):
        assert torch.equal(predicted(network), base)


def test_a_convolution_of_three_pixels_is_changed_at_each_of_them() -> None:
    for kind in ("lokr", "loha"):
        network = adapted(nn.Sequential(nn.Conv2d(8, 16, 3)), kind=kind, module_filters=None, rank=1)
        (layer,) = (layer for _, layer in adapted_layers(network))
        parts = {name: value.data for name, value in layer_parts(layer).items()}
        expected = by_the_paper(kind, parts, 3.0).view(16, 8, 3, 3)
        torch.testing.assert_close(layer.get_delta_weight(ADAPTER).data, expected)
        x = torch.randn(1, 8, 5, 5)
        with_it = nn.functional.conv2d(x, layer.get_base_layer().weight + expected, layer.get_base_layer().bias)
        torch.testing.assert_close(network(x), with_it, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [*LORAS, pytest.param({"init": "original"}, id="lora as the original's"), *OTHERS])
def test_new_adapters_leave_the_prediction_and_train_in_fp32_on_a_bf16_base(changes: dict[str, Any]) -> None:
    network = small_network().bfloat16()
    before, state = predict(network, dtype=torch.bfloat16), torch.get_rng_state()
    inject_lora(network, **NEW | changes)
    assert torch.equal(torch.get_rng_state(), state)
    pred = predict(network, dtype=torch.bfloat16)
    assert torch.equal(pred, before)
    pred.float().square().mean().backward()
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert all(f".{KINDS[changes.get('kind', 'lora')].prefix}" in name for name in trained)
    assert all(p.dtype == torch.float32 and p.grad is not None for p in trained.values())
    assert any(p.grad.abs().sum() > 0 for p in trained.values())
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in network.parameters() if not p.requires_grad)


def test_first_values_are_those_of_lycoris_and_depend_on_seed_and_name_alone() -> None:
    # LyCORIS at f49d30d, lycoris/modules/lokr.py and loha.py, without use_scalar
    wide, networks = {"block_out_channels": [64, 64]}, {}
    for kind in ("lokr", "loha"):
        for seed in (0, 0, 1):
            inject_lora(
                network := small_network(**wide), **NEW | {"kind": kind, "seed": seed, "module_filters": ["to_q"]}
            )
            networks.setdefault(kind, []).append(adapter_state(network.state_dict()))
        one, same, other = networks[kind]
        assert all(torch.equal(value, same[name]) for name, value in one.items())
        drawn = [name for name, value in one.items() if value.any()]
        assert not any(torch.equal(one[name], other[name]) for name in drawn)
        ends = {name.rpartition(".")[2] for name in drawn}
        assert ends == ({"lokr_w1", "lokr_w2_a"} if kind == "lokr" else {"hada_w1_a", "hada_w1_b", "hada_w2_b"})

    def values(kind: str, part: str) -> Tensor:
        return torch.cat([v.flatten() for n, v in networks[kind][0].items() if n.endswith(part)])

    assert values("lokr", "lokr_w1").abs().max() <= 8**-0.5
    assert values("lokr", "lokr_w1").std() == pytest.approx(8**-0.5 / 3**0.5, rel=0.1)
    assert [float(values("loha", f"hada_{part}").std()) for part in ("w1_a", "w1_b", "w2_b")] == pytest.approx(
        [0.1, 1.0, 1.0], rel=0.15
    )


TEXT = "text_model.encoder.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("changes", [*LORAS, DORA, *OTHERS])
@pytest.mark.parametrize("format", ["peft", "kohya"])
def test_every_file_is_read_as_it_was_written_with_the_text_encoder(
    changes: dict[str, Any], format: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network, kind = adapted(**ON | changes), changes.get("kind", "lora")
    spec, own = lora_spec(network), {}
    if "ranks" in changes:
        own = {"ranks": spec.ranks | {f"text_encoder.{TEXT}": 2}, "alphas": spec.alphas | {f"text_encoder.{TEXT}": 0.1}}
    shapes = KINDS[kind].shapes(spec, 2 if own else spec.rank, (24, 24))
    text = {f"{TEXT}.{part}": torch.randn(shape) for part, shape in shapes.items()}
    lora = replace(stored(network, text), spec=replace(spec, **own))
    out = tmp_path / ("lora" if format == "peft" else "a.safetensors")
    assert export_lora(lora, network, out, format=format) < 1e-6
    assert holds_lora(str(out))
    found = read_from(str(out), modules=module_shapes(network))
    assert (found.spec.kind, found.spec.dora) == (kind, spec.dora)
    assert found.by_root()["text_encoder"].keys() == text.keys()
    assert lora_error(lora, found, out) < 1e-6
    if kind != "lokr":  # whose other scales go into the first matrix
        names = [*by_module(lora.state)]
        at = {"rel": 1e-7} if format in ("comfyui", "kohya") else {"rel": 0.0}  # whose alphas are fp32
        assert [found.spec.of(name) for name in names] == [pytest.approx(lora.spec.of(name), **at) for name in names]
    fresh = small_network()
    load_lora(fresh, str(out))
    torch.testing.assert_close(predicted(fresh), predicted(network), atol=1e-5, rtol=1e-5)
    if not own and (kind != "lokr" or format == "peft"):
        other = small_network()
        inject_lora(other, **NEW | changes | {"seed": 7})
        refill_lora(other, str(out), key="task.weights", module_filters=FILTERS)
        assert torch.equal(predicted(other.eval()), predicted(network))
        assert all(p.requires_grad == (f".{KINDS[kind].prefix}" in name) for name, p in other.named_parameters())


@pytest.mark.parametrize("changes", [*LORAS, DORA, *OTHERS])
def test_peft_itself_loads_a_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    network = adapted(**ON | changes)
    save_lora(stored(network), CASCADE, network.config, tmp_path / "lora")
    plain = build_plain_network(CASCADE, network.config, small_network().state_dict())
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "lora")).get_base_model().eval()
    torch.testing.assert_close(predicted(loaded), predicted(network), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha_pattern": {"to_q": 5.0}}, "LoKr adapters have ranks or alphas of their own .* train them anew"),
        ({"r": 10**9}, "its configuration names rank 1000000000, its tensors have 2"),
        ({"peft_type": "__class__"}, "peft_type='__class__' is not read; lora, lokr, loha are"),
    ],
)
def test_a_folder_whose_configuration_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    network, config = adapted(**ON, kind="lokr"), tmp_path / "lora" / "adapter_config.json"
    save_lora(stored(network), CASCADE, network.config, tmp_path / "lora")
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_from(str(tmp_path / "lora"), modules=module_shapes(network))


def test_a_decomposed_lora_goes_to_lycoris_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network, out = adapted(**ON, dora=True), tmp_path / "a.safetensors"
    with pytest.raises(ConfigError, match=r"format=comfyui: .* merge the adapters into weights: cascade-train merge"):
        export_lora(stored(network), network, out, format="comfyui")
    assert not out.exists()
    export_lora(stored(network), network, out, format="kohya")
    assert "ComfyUI and A1111 take other norms: merge" in caplog.text
    with safe_open(out, "pt") as file:
        assert file.metadata()["ss_network_module"] == "lycoris.kohya"


def test_comfyui_knows_modules_of_stage_b_by_kohyas_names_alone(tmp_path: Path) -> None:
    inject_lora(network := small_network(**SMALL_B), **NEW)
    export_lora(stored(network), network, tmp_path / "a.safetensors", format="comfyui")
    assert all(name.startswith("lora_unet_") for name in load_file(tmp_path / "a.safetensors"))


def comfyui_weights(network: CascadeUNet) -> list[str]:
    """Return the weights of ComfyUI's Stage C: those of diffusers below `attention.attn`, the output as `out_proj`."""
    names = [name for name in network.state_dict() if name.endswith(".weight")]
    names = [name.replace("attention.to_out.0", "attention.attn.out_proj") for name in names]
    return [name.replace("attention.to_", "attention.attn.to_") for name in names]


def in_comfyui(file: dict[str, Tensor], stem: str, shape: torch.Size) -> Tensor:
    """Return what is added to a weight by ComfyUI, comfy/weight_adapter/lora.py, lokr.py and loha.py.

    At 179c2d3 and 17adbb5.
    """
    own = {name.removeprefix(f"{stem}."): value for name, value in file.items() if name.startswith(f"{stem}.")}
    alpha, dim = own["alpha"], None
    if "lora_up.weight" in own:
        dim = len(own["lora_down.weight"])
        change = own["lora_up.weight"].flatten(1) @ own["lora_down.weight"].flatten(1)
    elif "hada_w1_a" in own:
        dim = len(own["hada_w1_b"])
        change = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    else:
        matrices = []
        for whole in ("lokr_w1", "lokr_w2"):
            if whole not in own:
                dim = len(own[f"{whole}_b"])
                own[whole] = own[f"{whole}_a"] @ own[f"{whole}_b"]
            matrices.append(own[whole])
        first, second = matrices
        change = torch.kron(first[:, :, None, None] if second.ndim == 4 else first, second)
    return (change if dim is None else alpha / dim * change).reshape(shape)


@pytest.mark.parametrize("changes", [*LORAS, *OTHERS])
def test_comfyui_computes_from_its_file_what_the_adapted_network_does(changes: dict[str, Any], tmp_path: Path) -> None:
    network, plain, out = adapted(**ON | changes), small_network(), tmp_path / "lora.safetensors"
    export_lora(stored(network), network, out, format="comfyui")
    file, used = load_file(out), 0
    weights = [name for name in plain.state_dict() if name.endswith(".weight")]
    for ours, theirs in zip(weights, comfyui_weights(plain), strict=True):
        stem = "lora_prior_unet_" + theirs.removesuffix(".weight").replace(".", "_")
        if f"{stem}.alpha" in file:
            weight, used = plain.get_parameter(ours), used + 1
            weight.data += in_comfyui(file, stem, weight.shape)
    assert used == len(lora_spec(network).targets)
    torch.testing.assert_close(predicted(plain), predicted(network), atol=1e-5, rtol=1e-4)
    with safe_open(out, "pt") as opened:
        header = opened.metadata()
    if "kind" in changes:
        assert header["ss_network_module"] == "lycoris.kohya"
        assert json.loads(header["ss_network_args"]) == {"algo": changes["kind"], "factor": changes.get("factor", -1)}
    else:
        assert header["ss_network_module"] == "networks.lora"


FOREIGN = {
    "both decomposed, ranks and alphas of their own": {
        "clip_txt_mapper": {
            **{"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 4), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 6), "alpha": 1.0},
        },
        "down_blocks_0_0_channelwise_0": {"lokr_w1": (8, 4), "lokr_w2_a": (16, 3), "lokr_w2_b": (3, 8), "alpha": 6.0},
    },
    "whole matrices, whose alpha counts for nothing": {
        "clip_txt_mapper": {"lokr_w1": (4, 4), "lokr_w2": (8, 6), "alpha": 7.0},
        "embedding_1": {"lokr_w1": (4, 4), "lokr_w2": (8, 4, 1, 1), "alpha": 7.0},
    },
    "whole beside decomposed": {
        "clip_txt_mapper": {"lokr_w1": (2, 2), "lokr_w2_a": (16, 2), "lokr_w2_b": (2, 12), "alpha": 1.0},
        "down_blocks_0_0_channelwise_0": {"lokr_w1": (2, 2), "lokr_w2": (64, 16), "alpha": 1.0},
    },
    "Hadamard products of other ranks": {
        "clip_txt_mapper": {
            **{"hada_w1_a": (32, 2), "hada_w1_b": (2, 24), "hada_w2_a": (32, 2), "hada_w2_b": (2, 24), "alpha": 1.0},
        },
        "down_blocks_0_0_channelwise_0": {
            **{"hada_w1_a": (128, 3), "hada_w1_b": (3, 32), "hada_w2_a": (128, 3), "hada_w2_b": (3, 32), "alpha": 5.0},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_lycoris_mean_what_they_mean_in_comfyui(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"lora_unet_{module}.{part}": torch.tensor(shape) if part == "alpha" else torch.randn(shape)
        for module, parts in FOREIGN[name].items()
        for part, shape in parts.items()
    }
    save_file(tensors, tmp_path / "a.safetensors")
    network = small_network()
    lora = read_from(str(tmp_path / "a.safetensors"), modules=module_shapes(network))
    load_lora(network, str(tmp_path / "a.safetensors"))
    assert len(lora.spec.targets) == len(FOREIGN[name])
    for target, layer in adapted_layers(network):
        shape = layer.get_base_layer().weight.shape
        expected = in_comfyui(dict(tensors), f"lora_unet_{target.replace('.', '_')}", shape)
        torch.testing.assert_close(layer.get_delta_weight(ADAPTER).data, expected, atol=1e-5, rtol=1e-5)


HALF = {"lokr_w1": (4, 4), "lokr_w2_a": (8, 2), "alpha": ()}
BROKEN = {
    "half": (HALF, "lora_unet_clip_txt_mapper lacks half of its adapter"),
    "factor": (
        {"lokr_w1": (4, 3), "lokr_w2": (8, 8), "alpha": ()},
        r"split the weights in no way that one task\.factor gives; train them anew",
    ),
    "Tucker": (HALF | {"lokr_t2": (2, 2, 3, 3)}, "lokr_t2 is no part of a LoKr adapter; files of one kind are read"),
    "mixed": (HALF | {"hada_w1_a": (4, 4)}, "hada_w1_a is no part of a LoKr adapter; files of one kind are read"),
    "shape": (
        {"lokr_w1": (4, 4), "lokr_w2": (8, 8), "alpha": ()},
        r"clip_txt_mapper.lokr_w2 has shape \(8, 8\), this model needs \(8, 6\)",
    ),
}


@pytest.mark.parametrize("factor", [None, 4, 24, 30, 48])
def test_the_factor_of_stored_adapters_is_found(factor: int | None) -> None:
    widths = ((320, 640), (1280, 1280), (1024, 320), (5120, 640))
    sizes = {
        pair: (a, b, c, d) for pair in widths for (a, b), (c, d) in [[lokr._split(width, factor) for width in pair]]
    }
    found = lokr._factor(sizes, "from=a")
    assert all((*lokr._split(o, found), *lokr._split(i, found)) == sizes[o, i] for o, i in widths)


def test_magnitudes_of_inputs_are_refused(tmp_path: Path) -> None:
    parts = {"lora_down.weight": torch.ones(2, 24), "lora_up.weight": torch.ones(32, 2), "alpha": torch.tensor(1.0)}
    tensors = {f"lora_unet_clip_txt_mapper.{part}": value for part, value in parts.items()}
    for inputs, message in ((torch.ones(1, 24), "has a magnitude for each input"), (torch.ones(32, 1), None)):
        save_file(tensors | {"lora_unet_clip_txt_mapper.dora_scale": inputs}, tmp_path / "a.safetensors")
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            read_from(str(tmp_path / "a.safetensors"), modules=module_shapes(small_network()))


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_not_read_are_refused(name: str, tmp_path: Path) -> None:
    parts, message = BROKEN[name]
    save_file(
        {f"lora_unet_clip_txt_mapper.{p}": torch.ones(shape) for p, shape in parts.items()}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ConfigError, match=message):
        read_from(str(tmp_path / "a.safetensors"), modules=module_shapes(small_network()))


def test_adapters_of_another_kind_and_the_originals_layout_are_refused(tmp_path: Path) -> None:
    network, other = adapted(**ON, kind="lokr"), small_network()
    save_lora(stored(network), CASCADE, network.config, tmp_path / "lora")
    inject_lora(other, **NEW, kind="loha")
    with pytest.raises(ConfigError, match=r"task\.weights=.*: its adapters are of another kind; set task\.kind=lokr"):
        refill_lora(other, str(tmp_path / "lora"), key="task.weights", module_filters=FILTERS)
    with pytest.raises(ConfigError, match=r"no place for adapters of another kind \(task\.kind=lokr\); choose another"):
        export_lora(stored(network), network, tmp_path / "a.safetensors", format="original")


def test_matrices_of_a_kronecker_product_show_no_size_of_a_model(tmp_path: Path) -> None:
    tensors = {"lora_unet_a.lokr_w1": torch.ones(2, 2), "lora_unet_a.lokr_w2": torch.ones(1152, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert adapter_size([CASCADE], str(tmp_path / "a.safetensors"), key="from") is None
