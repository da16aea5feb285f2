"""Files of the hub arrive whole and checked, through cuts and rate limits, or not at all; and stay where they are."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

import cascade_train.files.hub as hub_module
from cascade_train.errors import ConfigError
from cascade_train.files.hub import (
    HubSource,
    WebFile,
    find_fault,
    free_bytes,
    parse_source,
    push_folder,
)
from cascade_train.models.formats.weights_source import find_weight_files
from tests.loopback_hub import COMMIT, Hub, point_to, serving

BIG = bytes(range(256)) * 4000
WEIGHTS = "prior/diffusion_pytorch_model.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client waits, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[Hub]:
    with serving(Hub(files={"big.safetensors": BIG, "small.json": b"{}", WEIGHTS: BIG[:5000]})) as started:
        point_to(started, tmp_path / "hub", monkeypatch)
        yield started


def blobs(cache: Path) -> list[Path]:
    return [path for path in cache.glob("hub/*/blobs/*") if path.is_file()]


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


def test_wrong_bytes_are_refused_and_not_left_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    source = HubSource("owner/name", COMMIT, "")
    for name in ("big.safetensors", "small.json"):
        hub.faults.append("wrong")
        with pytest.raises(ConfigError, match=f"{name}: checksum mismatch of the download"):
            source.fetch(name)
        assert blobs(tmp_path) == []
        assert source.fetch(name).read_bytes() == hub.files[name]
        for path in blobs(tmp_path):
            path.unlink()


def test_a_damaged_file_is_found_and_downloaded_again(hub: Hub) -> None:
    source = HubSource("owner/name", COMMIT, "")
    path = source.fetch("big.safetensors")
    path.resolve().write_bytes(BIG[:-1] + b"?")
    assert "its hash is" in str(find_fault(path))
    assert source.fetch("big.safetensors", verify=True).read_bytes() == BIG
    assert find_fault(path) is None


def test_a_damaged_file_stays_until_its_replacement_is_whole(hub: Hub, tmp_path: Path) -> None:
    source, damage = HubSource("owner/name", COMMIT, ""), BIG[:-1] + b"?"
    path = source.fetch("big.safetensors")
    path.resolve().write_bytes(damage)
    hub.faults.append("wrong")
    with pytest.raises(ConfigError, match="checksum mismatch of the download"):
        source.fetch("big.safetensors", verify=True)
    assert path.read_bytes() == damage
    hub.commit = "d" * 40
    other = HubSource("owner/name", hub.commit, "").fetch("big.safetensors")  # another commit with the same content
    assert other.read_bytes() == path.read_bytes() == BIG
    assert [each.name for each in (tmp_path / "hub").iterdir() if "owner" not in each.name and each.is_dir()] == [
        ".locks"
    ], "nothing is left beside the cache"


def test_a_damaged_file_that_the_hub_has_no_more_is_to_be_deleted(hub: Hub) -> None:
    source = HubSource("owner/name", COMMIT, "")
    path = source.fetch("big.safetensors")
    path.resolve().write_bytes(b"?")
    hub.files["big.safetensors"] = BIG[:-1]
    with pytest.raises(ConfigError, match=f"{path.resolve()} is damaged, and the hub has another .*delete that file"):
        source.fetch("big.safetensors", verify=True)
    path.resolve().unlink()
    assert source.fetch("big.safetensors", verify=True).read_bytes() == BIG[:-1]


def test_a_folder_where_a_file_belongs_is_to_be_deleted(hub: Hub) -> None:
    source = HubSource("owner/name", COMMIT, "")
    path = source.fetch("small.json")
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=f"{path} lies where owner/name:small.json belongs, and is no file; delete"):
        source.fetch("small.json")
    path.rmdir()
    assert source.fetch("small.json") == path


HOSTILE = "../../../../written"


@pytest.mark.parametrize("name", ["big.safetensors", "absent.json"])
@pytest.mark.parametrize(
    "announced", [{"ETag": f'"{HOSTILE}"'}, {"X-Linked-Etag": "main"}, {"commit": HOSTILE}, {"commit": "c" * 39}]
)
def test_what_the_hub_announces_never_names_a_file(hub, tmp_path, name, announced):
    hub.commit = announced.get("commit", COMMIT)
    hub.headers = {key: value for key, value in announced.items() if key != "commit"}
    refused = name in hub.files or "commit" in announced
    error = ConfigError if refused else RemoteEntryNotFoundError
    with pytest.raises(error, match="' where a hash belongs; nothing was written" if refused else "404"):
        HubSource("owner/name", "main", "").fetch(name)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written] == ([] if refused else ["main", name]), "a known commit, an absent file"


def test_a_body_without_end_is_stopped_above_the_announced_size(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append("endless")
    with pytest.raises(ConfigError, match=r"small.json: more came than the 2 bytes that the hub announced"):
        HubSource("owner/name", COMMIT, "").fetch("small.json")
    assert blobs(tmp_path) == []
    assert hub.endless < 10_000_000


@pytest.mark.parametrize("status", [404, 500])
def test_the_body_of_an_error_is_read_up_to_a_bound(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.faults.append(f"endless {status}")
    with pytest.raises(HfHubHTTPError, match=str(status)) as caught:
        HubSource("owner/name", COMMIT, "").fetch("small.json")
    assert len(caught.value.response.content) == 65_536
    assert hub.endless < 10_000_000
    assert blobs(tmp_path) == []


def test_the_body_of_a_redirect_is_read_up_to_a_bound(hub: Hub) -> None:
    hub.faults.append("endless 302")
    assert HubSource("owner/name", COMMIT, "").fetch("small.json").read_bytes() == b"{}"
    assert hub.endless < 10_000_000


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(hub, waits, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"ConnectError: .*download it where there is a network"):
        find_weight_files("owner/name", part="prior")
    monkeypatch.setattr(hub_module, "_SECONDS", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="ReadTimeout"):
            find_weight_files("owner/name", part="prior")
    assert waits == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_the_client_logs_is_shown_once_and_by_handlers_that_hide_secrets(hub, capsys):
    client = logging.getLogger("huggingface_hub")
    client.addHandler(logging.StreamHandler())  # as it does when it is imported
    HubSource("owner/name", COMMIT, "").fetch("big.safetensors")
    client.warning("GET https://host/big?X-Amz-Signature=0123456789ab")
    assert "0123456789ab" not in capsys.readouterr().err


def test_a_rate_limit_is_waited_for_as_long_as_the_hub_says(hub: Hub, waits: list[float]) -> None:
    hub.faults.append((429, {"Retry-After": "7"}))
    assert HubSource("owner/name", COMMIT, "").fetch("big.safetensors").read_bytes() == BIG
    assert any(7 <= waited <= 9 for waited in waits)


@pytest.mark.parametrize(
    ("headers", "longest"),
    [
        ({"Retry-After": "601"}, 8),
        ({"Retry-After": "600"}, 601),
        ({"RateLimit": '"api";r=0;t=86400'}, 8),
        ({"RateLimit": '"api";r=0;t=600'}, 601),
    ],
)
@pytest.mark.parametrize("is_head", [True, False])
def test_a_rate_limit_above_ten_minutes_is_not_waited_for(hub, waits, headers, longest, is_head):
    hub.faults.extend([(429, headers)] * 6)
    hub.refusal = (429, headers) if is_head else None
    with pytest.raises(ConfigError, match="429.*wait some minutes, or log in"):
        find_weight_files("owner/name:big.safetensors", part="prior")
    assert max(waits) == longest


@pytest.mark.parametrize(
    ("source", "refusal", "message"),
    [
        ("owner/name@main:absent.pt", None, "RemoteEntryNotFoundError.*check the name of the file"),
        ("owner/name@v9:prior", None, "RevisionNotFoundError.*name another revision behind the @, such as @main"),
        ("owner/other:prior", None, "RepositoryNotFoundError.*if it is private, log in"),
        ("owner/name", (401, {"X-Error-Code": "GatedRepo"}), "GatedRepoError.*accept its terms at https.*owner/name"),
        ("owner/name", (429, {}), r"not a path, and the download from the hub failed.*wait some minutes, or log in"),
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


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"../../../..", COMMIT.encode() + b"0"])
def test_a_cached_reference_that_is_no_commit_is_refused_and_written_anew_once_it_is_deleted(hub, tmp_path, content):
    source = HubSource("owner/name", None, "")
    path = source.fetch("small.json")
    ref = tmp_path / "hub" / "models--owner--name" / "refs" / "main"
    ref.write_bytes(content)
    with pytest.raises(ConfigError, match=f"owner/name: {ref} has '.*' where a commit belongs; delete that file"):
        find_weight_files("owner/name", part="prior")
    ref.write_bytes(b"")
    assert source.commit is None
    ref.unlink()
    assert source.fetch("small.json") == path
    assert source.commit == COMMIT


def test_the_room_of_the_cache_is_that_of_its_disk(hub: Hub, tmp_path: Path) -> None:
    folder, free = free_bytes()
    assert folder == tmp_path / "hub"
    assert free > 0


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


def test_a_file_is_kept_where_torch_keeps_it_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 5000
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    with serving(Hub(files={"net.pth": content})) as hub:
        file = WebFile(f"{hub.url}/owner/name/resolve/main/net.pth", hashlib.sha256(content).hexdigest())
        assert file.path == Path(torch.hub.get_dir()) / "checkpoints" / "net.pth"
        assert file.size() == len(content)
        hub.faults.extend([70_000, "wrong", "endless"])
        for _ in range(3):  # a cut connection, other bytes, a body that is not announced and has no end
            with pytest.raises(ConfigError, match="net.pth: checksum mismatch of the download"):
                file.fetch()
            assert not list(file.path.parent.iterdir())
        assert hub.endless < 10_000_000, "what is not announced is not read"
        assert file.fetch().read_bytes() == content
        file.path.write_bytes(b"damaged")
        assert file.fetch().read_bytes() == content
        asked = len(hub.requests)
        assert (file.fetch(), file.size()) == (file.path, len(content))
        assert len(hub.requests) == asked
        with pytest.raises(OSError, match="404"):
            WebFile(f"{hub.url}/owner/name/resolve/main/absent.pth", "0" * 64).size()
