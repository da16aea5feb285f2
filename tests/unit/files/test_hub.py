"""Files of the hub arrive whole through cuts, stay at their commit, or what helps is said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, parse_source, push_folder
from cascade_train.models.formats.weights_source import find_weight_files
from tests.loopback_hub import COMMIT, Hub, point_to, serving

BIG = bytes(range(256)) * 4000
WEIGHTS = "prior/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving(Hub(files={"big.safetensors": BIG, "small.json": b"{}", WEIGHTS: BIG[:5000]})) as started:
        point_to(started, tmp_path / "hub", monkeypatch)
        yield started


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/name", HubSource("owner/name", None, "")),
        ("owner/name:a/b.pt", HubSource("owner/name", None, "a/b.pt")),
        ("owner/name@v1.0", HubSource("owner/name", "v1.0", "")),
        ("owner/name@refs/pr/1:prior", HubSource("owner/name", "refs/pr/1", "prior")),
        ("c_3b", None),
        ("/owner/name", None),
        ("owner/name@", None),
        ("../name", None),
        ("owner/name:../../../file.pt", None),
        ("owner/name@../main", None),
    ],
)
def test_a_source_names_repository_revision_and_place(source: str, expected: HubSource | None) -> None:
    assert parse_source(source) == expected


def test_a_file_comes_through_three_cuts_without_beginning_anew(hub: Hub) -> None:
    hub.faults.extend([300_000, 200_000, 1])
    fetched = HubSource("owner/name", COMMIT, "").fetch("big.safetensors")
    assert fetched.read_bytes() == BIG
    asked_for = f"/owner/name/resolve/{COMMIT}/big.safetensors"
    ranges = [asked for method, path, asked in hub.requests if (method, path) == ("GET", asked_for)]
    assert ranges[0] is None
    assert len(ranges) == 4
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in ranges[1:] if asked]
    assert starts == [300_000, 500_000, 500_000]


@pytest.mark.parametrize(
    ("source", "refusal", "message"),
    [
        ("owner/name@main:absent.pt", None, "RemoteEntryNotFoundError.*check the name of the file"),
        ("owner/name@v9:prior", None, "RevisionNotFoundError.*name another revision behind the @, such as @main"),
        ("owner/other:prior", None, "RepositoryNotFoundError.*if it is private, log in"),
        ("owner/name", (401, {"X-Error-Code": "GatedRepo"}), "GatedRepoError.*accept its terms at https.*owner/name"),
        ("owner/name", (500, {}), "HfHubHTTPError.*try again later, check proxies and HF_ENDPOINT"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_helps(hub, source, refusal, message):
    hub.refusal = refusal
    with pytest.raises(ConfigError, match=message):
        find_weight_files(source, part="prior")


def test_a_source_without_a_revision_stays_at_the_commit_of_its_first_download(hub, monkeypatch):
    first = find_weight_files("owner/name", part="prior")
    asked = len(hub.requests)
    hub.files = {WEIGHTS: BIG[:6000]}
    assert find_weight_files("owner/name", part="prior") == first
    assert len(hub.requests) == asked, "what is here needs no network"
    hub.commit = "d" * 40
    assert find_weight_files("owner/name@main", part="prior")[0].read_bytes() == BIG[:6000]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_weight_files(f"owner/name@{COMMIT}", part="prior") == first


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way to call its own client
def test_a_folder_is_pushed_into_a_private_repository(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in (("README.md", b"# A card"), ("big.safetensors", BIG[:5000]), ("other.txt", b"not asked for")):
        (folder / name).write_bytes(content)
    given = {"private": True, "names": ["README.md", "big*"]}
    assert push_folder(folder, "me/mine", **given) == f"{hub.url}/me/mine"
    assert hub.pushed == {"me/mine": {"README.md": b"# A card", "big.safetensors": BIG[:5000]}}
    assert hub.made[0]["visibility"] == "private"
    assert list(hub.stored.values()) == [BIG[:5000]], "what is large goes apart"
    hub.refusal = (403, {})
    with pytest.raises(ConfigError, match="push=somebody/else: the hub did not take it .*403 Forbidden.*log in"):
        push_folder(folder, "somebody/else", **given)
