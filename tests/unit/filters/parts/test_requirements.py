"""A file that a user has to bring is named with its licence and its usual place, a library with its extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from cascade_train.errors import ConfigError
from cascade_train.filters.canny import CannyFilter
from cascade_train.filters.parts.requirements import WeightsFile, find_file, load_weights, require

KNOWN = WeightsFile(key="task.filter.weights", what="an edge network", usual_name="e.pth", licence="MIT", found="a.org")
CPU = torch.device("cpu")


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 3)


def stored(path: Path, state: object) -> str:
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": dict(s)}, lambda s: {f"module.{k}": s[k] for k in s}])
def test_weights_are_read_in_the_forms_that_people_publish(tmp_path: Path, wrap) -> None:
    state = network().state_dict()
    loaded = nn.Linear(2, 3)
    load_weights(loaded, stored(tmp_path / "e.pth", wrap(state)), KNOWN, device=CPU)
    assert torch.equal(loaded.weight, state["weight"])


def test_a_file_that_is_not_there_is_described(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; give a path, or owner/name:file .* MIT.* a\.org"):
        find_file(str(tmp_path / "e.pth"), KNOWN)


def test_a_file_of_the_hub_that_cannot_be_had_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(repo: str, name: str, revision: str, **_: object) -> str:
        assert (repo, name, revision) == ("owner/name", "sub/e.pth", "main")
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match=r"e.pth: not a path, and the download from the hub failed \(OSError.* MIT"):
        find_file("owner/name:sub/e.pth", KNOWN)


def test_a_file_of_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cascade_train.files.hub.HubSource.fetch", lambda self, name, **_: tmp_path / name)
    assert find_file("owner/name:e.pth", KNOWN) == tmp_path / "e.pth"


def test_other_weights_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = stored(tmp_path / "e.pth", nn.Linear(2, 4).state_dict())
    with pytest.raises(ConfigError, match=r"holds other weights than these \(size mismatch for weight.* It is an edge"):
        load_weights(network(), path, KNOWN, device=CPU)


@pytest.mark.parametrize("name", ["e.pth", "e.safetensors"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not weights")
    with pytest.raises(ConfigError, match="is neither safetensors nor a pickle of tensors"):
        load_weights(network(), str(tmp_path / name), KNOWN, device=CPU)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds something else than tensors by name\. It is an edge network"):
        load_weights(network(), stored(tmp_path / "e.pth", {"epoch": 3}), KNOWN, device=CPU)


def test_a_filter_without_its_library_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    require("cv2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"task.filter: needs OpenCV, .* pip install --editable '\.\[filters\]'"):
        CannyFilter(resize=None, low=1, high=2)
