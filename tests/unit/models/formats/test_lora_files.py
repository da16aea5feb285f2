"""Stored adapters come back as they were, and those of another model are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export_lora import save_lora
from cascade_train.models.formats.lora_files import ADAPTER_CONFIG, ADAPTER_FILE
from cascade_train.models.lora import lora_spec
from tests.unit.models.small_networks import adapted, empty_network, load_lora, predict, small_network, stored


@pytest.fixture(scope="module")
def trained() -> CascadeUNet:
    return adapted(module_filters=[".attn", "embedding"])


@pytest.fixture(scope="module")
def run(trained: CascadeUNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that left its adapters in export/lora."""
    folder = tmp_path_factory.mktemp("run")
    error = save_lora(stored(trained), CASCADE, trained.config, folder / "export/lora")
    assert 0.0 <= error < 1e-6
    return folder


@pytest.mark.parametrize("inside", [".", "export", "export/lora", f"export/lora/{ADAPTER_FILE}"])
def test_an_exported_adapter_predicts_what_the_trained_one_did(run: Path, trained: CascadeUNet, inside: str) -> None:
    network = small_network()
    spec = load_lora(network, str(run / inside))
    assert torch.equal(predict(network), predict(trained))
    assert (spec.rank, spec.alpha) == (2, 3.0)
    assert set(spec.targets) == set(lora_spec(trained).targets)


def halves(name: str = "clip_txt_mapper") -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(2, 24), f"{name}.lora_B.weight": torch.ones(32, 2)}


@pytest.mark.parametrize(
    ("module", "header", "network", "message"),
    [
        ("clip_txt_mapper", {"base_size": "c_1b"}, {}, "to Stage C 1B, but the network is of another size"),
        ("clip_txt_mapper", {"base_size": "c_1b"}, {"conditioning_dim": 2048}, "is Stage C 3.6B; use model=c_1b"),
        ("mid.transformer_blocks.0.attn1", {}, {}, "from=.*: adapts .*attn1, which this model has not"),
        ("clip_txt_mapper", {}, {"conditioning_dim": 64}, r"has shape \(32, 2\), this model needs \(64, 2\)"),
    ],
)
def test_adapters_of_another_model_are_refused_by_name(
    module: str, header: dict[str, str], network: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_file(halves(module), tmp_path / "a.safetensors", metadata=header)
    with pytest.raises(ConfigError, match=message):
        load_lora(empty_network(**network), str(tmp_path / "a.safetensors"))


def test_adapters_of_integers_are_refused(run: Path, tmp_path: Path) -> None:
    found = load_file(run / "export" / "lora" / ADAPTER_FILE)
    name = next(name for name in found if name.endswith("lora_B.weight"))
    save_file({**found, name: found[name].int()}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=f"a.safetensors: {name} is stored as int32, and weights are floating"):
        load_lora(empty_network(), str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "from=.*absent: no such file or folder; give a run"),
        ("broken.safetensors", "is no readable adapter file"),
        ("foreign.safetensors", "holds no adapters in a format that is read here, but something.weight; see"),
        ("", f"is no adapter folder, it lacks {ADAPTER_CONFIG} or adapter_model.safetensors"),
    ],
)
def test_other_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_text("broken")
    save_file({"something.weight": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_lora(empty_network(), str(tmp_path / name))
