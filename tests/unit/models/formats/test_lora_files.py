"""Stored adapters come back as they were, and those of another model are refused by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export import build_plain_network, fixed_prediction
from cascade_train.models.formats.export_lora import save_lora
from cascade_train.models.formats.lora_files import ADAPTER_CONFIG, SINGLE_FILE, write_single_file
from cascade_train.models.lora import (
    ADAPTER,
    LoraSpec,
    StoredLora,
    adapted_layers,
    adapter_state,
    inject_lora,
    lora_spec,
)
from tests.unit.models.small_networks import empty_network, load_lora, predict, small_network

predicted = partial(fixed_prediction, CASCADE)


@pytest.fixture(scope="module")
def trained() -> CascadeUNet:
    """A network whose adapters are not zero."""
    network = small_network()
    inject_lora(network, rank=2, alpha=3.0, dropout=0.1, module_filters=[".attn", "embedding"], seed=0)
    for index, (_, layer) in enumerate(adapted_layers(network)):
        torch.nn.init.normal_(layer.lora_B[ADAPTER].weight, generator=torch.Generator().manual_seed(index))
    return network.eval()


@pytest.fixture(scope="module")
def run(trained: CascadeUNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that left its adapters in export/lora."""
    folder = tmp_path_factory.mktemp("run")
    lora = StoredLora(spec=lora_spec(trained), state=adapter_state(trained.state_dict()))
    error = save_lora(lora, CASCADE, trained.config, folder / "export" / "lora", metadata={"run": "lora-c_tiny"})
    assert 0.0 <= error < 1e-6
    return folder


@pytest.mark.parametrize("inside", [".", "export", "export/lora", f"export/lora/{SINGLE_FILE}"])
def test_an_exported_adapter_predicts_what_the_trained_one_did(run: Path, trained: CascadeUNet, inside: str) -> None:
    network = small_network()
    spec = load_lora(network, str(run / inside))
    assert torch.equal(predict(network), predict(trained))
    assert (spec.rank, spec.alpha) == (2, 3.0)
    assert set(spec.targets) == set(lora_spec(trained).targets)


def test_peft_itself_loads_the_folder(run: Path, trained: CascadeUNet) -> None:
    base = build_plain_network(CASCADE, trained.config, small_network().state_dict())
    before = predicted(base)
    adapted = PeftModel.from_pretrained(base, str(run / "export" / "lora"))
    found = predicted(adapted.get_base_model().eval())
    torch.testing.assert_close(found, predicted(trained))
    assert not torch.allclose(found, before, atol=1e-2)


def test_the_single_file_says_what_it_is(run: Path) -> None:
    from safetensors import safe_open

    with safe_open(run / "export" / "lora" / SINGLE_FILE, framework="pt") as file:
        header = file.metadata()
    assert header["format"] == "cascade_train.lora/1"
    assert (header["rank"], header["alpha"], header["base_size"], header["run"]) == ("2", "3.0", "", "lora-c_tiny")
    assert "down_blocks.0.2.attention.to_q" in json.loads(header["targets"])


def tiny_state(rows: int = 2, name: str = "clip_txt_mapper") -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(rows, 24), f"{name}.lora_B.weight": torch.ones(32, rows)}


def write(path: Path, state: dict[str, Tensor], base_size: str | None = None, targets: tuple[str, ...] = ()) -> str:
    names = targets or tuple({name.rsplit(".lora_", 1)[0] for name in state})
    spec = LoraSpec(rank=2, alpha=1.0, targets=names, base_size=base_size)
    write_single_file(path, StoredLora(spec=spec, state=state), {})
    return str(path)


def test_the_published_sizes_are_kept_apart(tmp_path: Path) -> None:
    source = write(tmp_path / "lora.safetensors", tiny_state(), base_size="c_1b")
    with pytest.raises(
        ConfigError, match="the adapter belongs to Stage C 1B, but the network is of another size; use model=c_1b"
    ):
        load_lora(empty_network(), source)
    with pytest.raises(ConfigError, match="but the network is Stage C 3.6B; use model=c_1b"):
        load_lora(empty_network(conditioning_dim=2048), source)


def test_a_module_that_the_network_has_not_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "lora.safetensors", tiny_state(name="effnet_mapper.0"))
    with pytest.raises(ConfigError, match="from=.*: adapts effnet_mapper.0, which this model has not"):
        load_lora(empty_network(), source)


def test_a_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "lora.safetensors", tiny_state())
    with pytest.raises(
        ConfigError, match=r"clip_txt_mapper.lora_B.weight has shape \(32, 2\), this model needs \(64, 2\)"
    ):
        load_lora(empty_network(conditioning_dim=64), source)


def test_tensors_that_do_not_match_the_list_of_modules_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "lora.safetensors", tiny_state(), targets=("clip_txt_mapper", "clf.1"))
    with pytest.raises(ConfigError, match=r"are not those of the adapted modules \(2 missing: clf.1.lora_A.weight"):
        load_lora(empty_network(), source)


def test_adapters_of_integers_are_refused(run: Path, tmp_path: Path) -> None:
    stored = load_file(run / "export" / "lora" / SINGLE_FILE)
    with safe_open(run / "export" / "lora" / SINGLE_FILE, framework="pt") as file:
        header = file.metadata()
    name = next(name for name in stored if name.endswith("lora_B.weight"))
    save_file({**stored, name: stored[name].int()}, tmp_path / "lora.safetensors", metadata=header)
    with pytest.raises(ConfigError, match=f"lora.safetensors: {name} is stored as int32, and weights are floating"):
        load_lora(empty_network(), str(tmp_path / "lora.safetensors"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from=.*absent: no such file or folder; give a run"):
        load_lora(empty_network(), str(tmp_path / "absent"))
    (tmp_path / "broken.safetensors").write_text("broken")
    with pytest.raises(ConfigError, match="is no readable adapter file"):
        load_lora(empty_network(), str(tmp_path / "broken.safetensors"))
    save_file({"something.weight": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ConfigError, match="holds no adapters in a format that is read here, but something.weight; see"):
        load_lora(empty_network(), str(tmp_path / "foreign.safetensors"))
    with pytest.raises(
        ConfigError, match=f"is no adapter folder, it lacks {ADAPTER_CONFIG} or adapter_model.safetensors"
    ):
        load_lora(empty_network(), str(tmp_path))
