"""Weights from every known format land in the network unchanged, and wrong ones are refused by name."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.family import CASCADE, original_state
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.weights import StoredTensors, load_module, load_pickle, load_state
from tests.unit.models.small_networks import SMALL_B, empty_network, small_network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> CascadeUNet:
    return small_network()


def load(source: Path | str, **changes: object) -> CascadeUNet:
    fresh = empty_network(**changes)
    load_state(fresh, str(source), dtype=torch.float32)
    return fresh


def assert_same(found: nn.Module, expected: dict[str, Tensor]) -> None:
    state = found.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_diffusers_folder_loads(network: CascadeUNet, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path)
    assert_same(load(tmp_path), network.state_dict())


def test_a_sharded_diffusers_folder_loads(network: CascadeUNet, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), network.state_dict())
    assert_same(load(tmp_path / "diffusion_pytorch_model.safetensors.index.json"), network.state_dict())


def test_an_index_that_names_an_absent_shard_is_refused(network: CascadeUNet, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path, max_shard_size="100KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="which is not there; copy it again"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["c.safetensors", "c.pt", "c.bin"])
@pytest.mark.parametrize("rename", [dict, original_state])
def test_a_single_file_loads_under_diffusers_and_original_names(
    network: CascadeUNet, tmp_path: Path, name: str, rename: object
) -> None:
    state = rename(network.state_dict())
    if name.endswith(".safetensors"):
        save_file(state, tmp_path / name)
    else:
        torch.save({"state_dict": state}, tmp_path / name)
    assert_same(load(tmp_path / name), network.state_dict())


def test_stage_b_under_the_originals_names_loads(tmp_path: Path) -> None:
    network = small_network(**SMALL_B)
    renamed = original_state(network.state_dict())
    assert "clip_mapper.weight" in renamed
    save_file(renamed, tmp_path / "b.safetensors")
    assert_same(load(tmp_path / "b.safetensors", **SMALL_B), network.state_dict())


def test_loading_casts_and_keeps_frozen_what_is_frozen(network: CascadeUNet, tmp_path: Path) -> None:
    save_file(network.state_dict(), tmp_path / "c.safetensors")
    fresh = empty_network().requires_grad_(requires_grad=False)
    load_state(fresh, str(tmp_path / "c.safetensors"), dtype=torch.bfloat16)
    weight = fresh.clip_txt_mapper.weight
    assert weight.dtype == torch.bfloat16
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert torch.equal(weight, network.clip_txt_mapper.weight.bfloat16())


@pytest.mark.parametrize("name", ["c.safetensors", "c.pt"])
def test_loaded_weights_do_not_hang_on_the_file(network: CascadeUNet, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    save_file(network.state_dict(), file) if name == "c.safetensors" else torch.save(network.state_dict(), file)
    loaded = load(file)
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert_same(loaded, network.state_dict())


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("clip_txt_mapper.weight", (2048, 1280), "c_3b"),
        ("clip_txt_mapper.weight", (1536, 1280), "c_1b"),
        ("clip_txt_mapper.weight", (128, 128), None),
        ("down_blocks.1.0.channelwise.0.weight", (2560, 640), "b_3b"),
        ("down_blocks.1.0.channelwise.0.weight", (2304, 576), "b_700m"),
        ("down_blocks.1.0.channelwise.0.weight", (512, 128), None),
        ("elsewhere.weight", (2048, 1280), None),
    ],
)
def test_the_published_sizes_are_recognised_from_shapes(name: str, shape: tuple[int, ...], size: str | None) -> None:
    assert CASCADE.size_of({name: shape}) == size


@pytest.mark.parametrize(
    ("width", "own", "message"),
    [
        (2048, 32, "these are weights of Stage C 3.6B, but the network is of another size; use model=c_3b"),
        (1536, 2048, "these are weights of Stage C 1B, but the network is Stage C 3.6B; use model=c_1b"),
    ],
)
def test_weights_of_another_size_are_refused_naming_both(tmp_path: Path, width: int, own: int, message: str) -> None:
    save_file({"clip_txt_mapper.weight": torch.zeros(width, 1)}, tmp_path / "c.safetensors")
    with pytest.raises(ConfigError, match=f"model.weights=.*{message}"):
        load(tmp_path / "c.safetensors", conditioning_dim=own)


def test_missing_and_unexpected_keys_are_named(network: CascadeUNet, tmp_path: Path) -> None:
    state = dict(network.state_dict()) | {"alien.weight": torch.zeros(1)}
    del state["clf.1.weight"]
    save_file(state, tmp_path / "c.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: clf.1.weight; 1 unexpected: alien.weight"):
        load(tmp_path / "c.safetensors")


@pytest.mark.parametrize("name", ["c.safetensors", "c.pt"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("rename", [dict, original_state])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    network: CascadeUNet, tmp_path: Path, name: str, dtype: torch.dtype, rename: Callable[..., dict[str, Tensor]]
) -> None:
    state = rename(network.state_dict())
    changed = list(state)[7]
    state[changed] = state[changed].to(dtype)
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    message = rf"model.weights={tmp_path}/{name}: {re.escape(changed)} is stored as {str(dtype)[6:]}, and weights are"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name)


def test_counts_and_indices_may_be_integers(tmp_path: Path) -> None:
    whole = {"0.num_batches_tracked": torch.tensor(3), "embeddings.position_ids": torch.arange(4)[None]}
    save_file(whole, tmp_path / "c.safetensors")
    with StoredTensors([tmp_path / "c.safetensors"], key="model.weights") as tensors:
        assert tensors.shapes() == {"0.num_batches_tracked": (), "embeddings.position_ids": (1, 4)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c.safetensors", "cannot be read as safetensors .*; copy or download it again"),
        ("code.pt", "cannot be read as weights alone"),
        ("step.pt", "something else than tensors"),
    ],
)
def test_broken_files_pickles_with_code_and_those_without_tensors_are_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "c.safetensors").write_bytes(b"not tensors at all")
    torch.save({"path": tmp_path}, tmp_path / "code.pt")
    torch.save({"step": 3}, tmp_path / "step.pt")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name)


def test_a_module_loads_by_its_own_names_with_its_buffers(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    source[1].num_batches_tracked.fill_(5)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "effnet.pt")
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    where = {"source": str(tmp_path / "effnet.pt"), "device": CPU, "key": "model.previewer.weights"}
    load_module(fresh, dtype=torch.bfloat16, **where)
    assert fresh[0].weight.dtype == torch.bfloat16
    assert fresh[1].num_batches_tracked == 5
    assert fresh[1].num_batches_tracked.dtype == torch.int64
    with pytest.raises(ConfigError, match="model.previewer.weights=.*: not the weights of this model"):
        load_module(fresh[0], dtype=torch.float32, **where)


def test_pickles_of_the_old_form_and_compressed_by_another_program_are_read(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0), "b": torch.randn(1000, 100)}
    torch.save(values, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(values, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "squeezed.pt", "w", zipfile.ZIP_DEFLATED) as squeezed,
    ):
        for each in stored.infolist():
            squeezed.writestr(each.filename, stored.read(each))
    for name in ("old.pt", "stored.pt", "squeezed.pt"):
        found = load_pickle(tmp_path / name, "model.weights")
        assert all(torch.equal(found[key], values[key]) for key in values), name


def test_a_zip_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for content in (whole[:-30], whole[300:], b"junk" * 100):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read as weights alone"):
            load_pickle(tmp_path / "a.pt", "model.weights")
