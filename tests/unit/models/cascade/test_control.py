"""Control networks on disk: the original's layout with and without a header, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.errors import ConfigError, RunError
from cascade_train.models.cascade import control
from cascade_train.models.cascade.control import StoredControl, read_control, save_control
from cascade_train.models.cascade.networks.controlnet import ControlNetwork, ControlSpec, build_control_network

KEY = "task.weights"
PUBLISHED = (0, 4, 8, 12, 51, 55, 59, 63)
NODE = {"_target_": "cascade_train.filters.canny.CannyFilter", "resize": 224, "low": 100.0, "high": 200.0}


def stored(bottleneck: str = "simple", blocks: tuple[int, ...] = (3, 0)) -> StoredControl:
    """Return a control network of which nothing is zero."""
    spec = ControlSpec(channels=2, bottleneck=bottleneck, blocks=blocks, widths=(6,) * len(blocks))
    network = build_control_network(spec, device=torch.device("cpu"), seed=0)
    state = {name: value + 1e-3 * (value.dtype == torch.float32) for name, value in network.state_dict().items()}
    return StoredControl(spec=spec, state=state, base_size="c_1b", filter=NODE)


def bare(given: StoredControl, folder: Path, **more: Tensor) -> str:
    """Write the same file as the original does, without a header."""
    save_file({**given.state, **more}, folder / "canny.safetensors")
    return str(folder / "canny.safetensors")


@pytest.mark.parametrize("bottleneck", ["simple", "small"])
def test_what_is_written_is_read_back_whole(bottleneck: str, tmp_path: Path) -> None:
    given = stored(bottleneck)
    assert save_control(given, tmp_path / "export" / "controlnet") == 0.0
    for source in (tmp_path, tmp_path / "export", tmp_path / "export" / "controlnet" / "controlnet.safetensors"):
        found = read_control(str(source), key=KEY)
        assert (found.spec, found.base_size, found.filter) == (given.spec, "c_1b", NODE)
        assert found.state.keys() == given.state.keys()
        assert all(torch.equal(found.state[name], value) for name, value in given.state.items())


@pytest.mark.parametrize(
    ("name", "channels", "bottleneck"),
    [("canny", 1, "effnet"), ("inpainting", 4, "effnet"), ("super_resolution", 16, "large")],
)
def test_the_published_layouts_are_told_by_names_and_shapes(
    name: str, channels: int, bottleneck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ControlSpec(channels=channels, bottleneck=bottleneck, blocks=PUBLISHED, widths=(2048,) * len(PUBLISHED))
    with torch.device("meta"):
        tensors = ControlNetwork(spec).state_dict()
    monkeypatch.setattr(control, "_find", lambda source, key: Path(source))
    monkeypatch.setattr(control, "read_tensors", lambda path, key, what: ({}, tensors))
    assert read_control(f"{name}.safetensors", key=KEY, blocks=PUBLISHED).spec == spec
    with pytest.raises(
        ConfigError, match=f"holds 8 projections of task.bottleneck={bottleneck} for maps of {channels} "
    ):
        read_control(f"{name}.safetensors", key=KEY)


def test_what_a_bare_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    path = bare(stored(), tmp_path)
    asked = (
        r"task.weights=.*canny.safetensors: holds 2 projections of task.bottleneck=simple for maps of 2 channels, and "
        r"does not say which .* filter@task.filter\. .*task.blocks=\[0,4,8,12,51,55,59,63\]; canny is of .*sr_effnet"
    )
    with pytest.raises(ConfigError, match=asked):
        read_control(path, key=KEY)
    with pytest.raises(ConfigError, match=r"2 channels, task.blocks=\[1\] names 1 blocks; name as many, in the order"):
        read_control(path, key=KEY, blocks=[1])


def test_blocks_that_the_header_contradicts_are_refused(tmp_path: Path) -> None:
    save_control(stored(), tmp_path / "controlnet")
    with pytest.raises(ConfigError, match=r"which control the blocks \[3, 0\], not task.blocks=\[0, 3\]; leave"):
        read_control(str(tmp_path), key=KEY, blocks=[0, 3])


def test_what_is_no_control_network_is_refused(tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x08")
    (tmp_path / "run" / "export" / "prior").mkdir(parents=True)
    (tmp_path / "empty" / "export" / "controlnet").mkdir(parents=True)
    for source, message in (
        ("other.safetensors", "holds no control network, but conv.weight; name a controlnet.safetensors"),
        ("damaged.safetensors", "is no readable control network"),
        ("run", "this run has left no export/controlnet, only prior"),
        ("empty", "no controlnet.safetensors in .*; name a run of task=controlnet"),
        ("none.safetensors", "no such file or folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_control(str(tmp_path / source), key=KEY)


def test_a_file_that_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        save_file({name: value + 1 for name, value in tensors.items()}, path, metadata)

    monkeypatch.setattr(control, "write_tensors", spoil)
    with pytest.raises(RunError, match="reads back differently"):
        save_control(stored(), tmp_path / "controlnet")
    assert not (tmp_path / "controlnet").exists()


def test_the_file_holds_the_names_of_the_original_alone(tmp_path: Path) -> None:
    save_control(stored(), tmp_path / "controlnet")
    names = load_file(tmp_path / "controlnet" / "controlnet.safetensors")
    expected = [f"backbone.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    expected += [f"projections.{i}.{layer}.weight" for i in (0, 1) for layer in (0, 2)]
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize(("size", "told"), [("c_1b", True), (None, False)])
def test_an_export_says_where_comfyui_applies_another(
    size: str | None, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_control(replace(stored(), base_size=size), tmp_path / "controlnet")
    assert ("ComfyUI applies a control network right at blocks [0,4,8" in caplog.text) == told
