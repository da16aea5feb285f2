"""Weights in the original's layout are those that went in, and merged adapters do what they did beside the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cascade_train.errors import ConfigError, RunError
from cascade_train.models.cascade import family
from cascade_train.models.cascade.family import CASCADE, original_state
from cascade_train.models.formats import export_lora as export_lora_module
from cascade_train.models.formats.export import build_plain_network, fixed_prediction, save_network
from cascade_train.models.formats.export_lora import export_lora, read_changes
from cascade_train.models.formats.lora_files import adapter_size, holds_lora
from cascade_train.models.formats.weights import load_state, stored_size
from tests.unit.models.small_networks import SMALL_B, adapted, empty_network, load_lora, small_network, stored
from tests.unit.models.test_lora_formats import FERNANDO, RANKS, TOKENS

predicted = partial(fixed_prediction, CASCADE)


@pytest.mark.parametrize("stage", ["b", "c"])
def test_a_single_file_has_the_original_names_and_comes_back(stage: str, tmp_path: Path) -> None:
    network = small_network(**(SMALL_B if stage == "b" else {}))
    state = {name: value.bfloat16() for name, value in network.state_dict().items()}
    out = tmp_path / "stage.safetensors"
    assert save_network(CASCADE, state, network.config, out, format="original") < 1e-2
    found = load_file(out)
    assert ("clip_mapper.weight" in found) == (stage == "b")
    assert not any(".to_" in name for name in found)
    for stem in {name.removesuffix("to_q.bias") for name in state if name.endswith("to_q.bias")}:
        for leaf in ("weight", "bias"):
            fused = torch.cat([state[f"{stem}to_{p}.{leaf}"] for p in "qkv"])
            assert torch.equal(found[f"{stem}attn.in_proj_{leaf}"], fused)
            assert torch.equal(found[f"{stem}attn.out_proj.{leaf}"], state[f"{stem}to_out.0.{leaf}"])
    fresh = empty_network(**(SMALL_B if stage == "b" else {}))
    back = load_state(fresh, str(out), dtype=None, key="from")
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, state[name]) for name, value in back.items())
    assert [path.name for path in tmp_path.iterdir()] == ["stage.safetensors"]


def test_a_network_folder_is_weights_again(tmp_path: Path) -> None:
    network = small_network()
    save_network(CASCADE, network.state_dict(), network.config, tmp_path / "prior", format="diffusers")
    fresh = empty_network()
    load_state(fresh, str(tmp_path), dtype=torch.float32, key="from")
    assert torch.equal(predicted(fresh), predicted(network))
    assert (tmp_path / "prior" / "config.json").is_file()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {name: value + (1e-3 if name == "clf.1.bias" else 0) for name, value in state.items()},
        lambda state: {name: value for name, value in state.items() if name != "clf.1.bias"},
    ],
)
def test_a_file_that_reads_back_differently_never_appears(
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = small_network()
    monkeypatch.setattr(family, "original_state", lambda state: original_state(damage(state)))
    with pytest.raises(RunError, match="clf.1.bias reads back differently from what was written; nothing was kept"):
        save_network(CASCADE, network.state_dict(), network.config, tmp_path / "stage.safetensors", format="original")
    assert not list(tmp_path.iterdir())


def test_sizes_are_told_from_the_tensors(tmp_path: Path) -> None:
    network = small_network(conditioning_dim=1536, block_out_channels=[4, 4])
    save_network(CASCADE, network.state_dict(), network.config, tmp_path / "c.safetensors", format="original")
    assert stored_size(CASCADE, str(tmp_path / "c.safetensors"), key="from") == "c_1b"
    assert not holds_lora(str(tmp_path / "c.safetensors"))
    assert not holds_lora("owner/name")
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(ConfigError, match="holds no tensors"):
        load_state(empty_network(), str(tmp_path / "empty.pt"), dtype=None, key="from")


@pytest.mark.parametrize("name", CASCADE.lora_formats)
def test_adapters_go_out_in_every_format(name: str, tmp_path: Path) -> None:
    network = adapted(module_filters=[".attn", "embedding", "channelwise.0"], ranks=RANKS)
    out = tmp_path / ("lora" if name == "peft" else "lora.safetensors")
    assert export_lora(stored(network, tokens=TOKENS), network, out, format=name) < 1e-5
    assert holds_lora(str(out))
    assert adapter_size([CASCADE], str(out), key="from") is None
    base = small_network()
    assert (predicted(base) - predicted(network)).abs().max() > 1e-2
    for fresh in (build_plain_network(CASCADE, network.config, small_network().state_dict()), base):
        load_lora(fresh, str(out))
        torch.testing.assert_close(predicted(fresh), predicted(network), atol=1e-5, rtol=1e-6)
    embeddings = tmp_path / "lora.embeddings"
    assert embeddings.is_dir() == (name in ("comfyui", "kohya"))
    if embeddings.is_dir():
        assert torch.equal(load_file(embeddings / "fernando.safetensors")["clip_g"], FERNANDO.rows)


def test_adapters_that_read_back_differently_never_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = adapted()
    lora, write = stored(network, tokens=TOKENS), export_lora_module.write_peft_folder
    fewer = {name: value for name, value in lora.state.items() if "down_blocks.0" not in name}
    targets = tuple(name for name in lora.spec.targets if f"{name}.lora_A.weight" in fewer)
    for changes, reason in (
        ({"state": {name: value + 1e-3 for name, value in lora.state.items()}}, "reads back with a relative error of"),
        ({"tokens": {}}, "trained tokens read back"),
        ({"state": fewer, "spec": replace(lora.spec, targets=targets)}, "other modules are adapted"),
    ):
        other = replace(lora, **changes)
        monkeypatch.setattr(export_lora_module, "write_peft_folder", lambda path, _, other=other: write(path, other))
        with pytest.raises(RunError, match=reason):
            export_lora(lora, network, tmp_path / "lora", format="peft")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"kind": "lokr"}, {"kind": "loha"}], ids=str)
def test_merged_weights_predict_what_the_adapted_network_does(options: dict[str, Any], tmp_path: Path) -> None:
    network = adapted(module_filters=[".attn", "embedding", "channelwise", "clf", "upscalers"], **options)
    export_lora(stored(network), network, tmp_path / "lora", format="peft")
    plain = small_network()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    change = read_changes(plain, [str(tmp_path / "lora")], [1.0], key="lora")
    full = {name: change(name, value) for name, value in before.items()}
    plain.load_state_dict(full)
    torch.testing.assert_close(predicted(plain), predicted(network), atol=1e-4, rtol=1e-4)
    changed = {name for name, value in full.items() if not torch.equal(value, before[name])}
    assert changed == {f"{name}.weight" for name in stored(network).spec.targets}


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"kind": "lokr"}, {"kind": "loha"}], ids=str)
@pytest.mark.parametrize("original", [False, True])
def test_a_merge_rounds_once_however_weak_the_adapters_are(
    options: dict[str, Any], original: bool, tmp_path: Path
) -> None:
    network, base = adapted(module_filters=[".attn", "embedding"], **options), small_network()
    export_lora(stored(network), network, tmp_path / "lora", format="peft")
    source = tmp_path / ("base.safetensors" if original else "base")
    save_network(CASCADE, base.state_dict(), base.config, source, format="original" if original else "diffusers")

    def merged(dtype: torch.dtype) -> dict[str, Tensor]:
        change = read_changes(base, [str(tmp_path / "lora")] * 3, [0.01, 0.02, -0.005], key="lora")
        return load_state(empty_network(), str(source), dtype=dtype, key="from", change=change)

    whole, half = merged(torch.float32), merged(torch.bfloat16)
    assert any(not torch.equal(value, base.state_dict()[name]) for name, value in whole.items())
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in half.items())


def test_a_merge_says_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = adapted()
    source = tmp_path / "lora"
    export_lora(stored(network, tokens=TOKENS), network, source, format="peft")
    plain = small_network()
    with caplog.at_level(logging.WARNING):
        read_changes(plain, [str(source)], [1.0], key="lora")
    assert "only what belongs to the network is merged" in caplog.text


def test_adapters_are_not_taken_for_weights(tmp_path: Path) -> None:
    network = adapted()
    export_lora(stored(network), network, tmp_path / "lora.safetensors", format="comfyui")
    with pytest.raises(ConfigError, match="from=.*: holds adapters, not a network's weights; train on them with task"):
        load_state(empty_network(), str(tmp_path / "lora.safetensors"), dtype=None, key="from")
