"""What a model needs of the hub is downloaded, checked and pinned; runs record what they loaded, and work offline."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from cascade_train.__main__ import launch
from cascade_train.commands.export import ExportArgs, export
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_source import TOKENIZER_FILES, find_weight_files
from cascade_train.models.text_encoder import PACKAGED_TOKENIZER
from cascade_train.results.evaluation.published import CLIP, NETWORKS, WebFile
from tests.integration.runs import SMALL
from tests.loopback_hub import COMMIT, Hub, point_to, serving

PINNED = f"owner/name@{COMMIT}"
NEEDS = (
    "task=lora",
    "model=c_tiny",
    f"model.weights={PINNED}:prior",
    f"model.text_encoder.weights={PINNED}",
    "model.text_encoder.subfolder=text_encoder",
    f"model.text_encoder.tokenizer={PINNED}",
    "model.text_encoder.tokenizer_subfolder=tokenizer",
    "model.semantic_compressor.weights=owner/name:semantic_compressor",
    "model.previewer.weights=owner/name@main:previewer",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tiny cascade as a repository, with a text tower and files that nothing needs."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 671, "hidden_size": 128, "intermediate_size": 512, "projection_dim": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 24}
    folder = tmp_path_factory.mktemp("tower")
    CLIPTextModelWithProjection(CLIPTextConfig(**sizes, **layers)).save_pretrained(folder)
    found = {"README.md": b"# A card", "text_encoder/flax_model.msgpack": bytes(5000)}
    found |= {f"text_encoder/{path.name}": path.read_bytes() for path in folder.iterdir()}
    found |= {f"tokenizer/{path.name}": path.read_bytes() for path in PACKAGED_TOKENIZER.iterdir() if path.is_file()}
    for part in ("prior", "semantic_compressor", "previewer"):
        found |= {f"{part}/{path.name}": path.read_bytes() for path in find_weight_files("package:tiny", part=part)}
    return found


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving(Hub(files=dict(files))) as started:
        point_to(started, tmp_path / "hub", monkeypatch)
        yield started


def fetched(hub: Hub) -> set[str]:
    """Return the names of the files whose content was asked for."""
    asked = (path.partition("/resolve/")[2] for method, path, _ in hub.requests if method == "GET")
    return {path.partition("/")[2] for path in asked if path}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way to call its own client
def test_what_a_training_needs_is_downloaded_through_three_cuts_and_used_offline(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["download", *NEEDS, "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert "to fetch  owner/name@cccccccccccc:prior/" in shown
    assert "Free: " in shown
    assert not fetched(hub)

    hub.faults.extend([300_000, 2000, 10])
    assert launch(["download", *NEEDS]) == 0
    assert "files match their hashes" in capsys.readouterr().out
    assert not hub.faults
    assert {name.partition("/")[0] for name in fetched(hub)} == {
        "prior", "text_encoder", "tokenizer", "semantic_compressor", "previewer",
    }  # fmt: skip
    assert "text_encoder/flax_model.msgpack" not in fetched(hub)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert launch(["download", *NEEDS]) == 0
    assert "to fetch" not in capsys.readouterr().out
    assert launch([*SMALL, *NEEDS, "train.max_steps=1", "run.dir=run"]) == 0
    assert len(hub.requests) == asked, "offline, nothing is asked"

    record = json.loads(Path("run/weights.json").read_text())
    name, content = next((name, hub.files[name]) for name in hub.files if name.startswith("prior/"))
    assert record["model.weights"] == {
        "source": f"{PINNED}:prior",
        "commit": COMMIT,
        "files": {Path(name).name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}},
    }
    assert record["model.semantic_compressor.weights"]["commit"] == COMMIT, "the pin of the first download"
    words = {path.name for path in PACKAGED_TOKENIZER.iterdir()} & set(TOKENIZER_FILES)
    assert record["model.text_encoder.tokenizer"]["files"].keys() == words
    refused_after_a_change(capsys)
    pushed_with_a_card(hub, monkeypatch)


def refused_after_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Continue the run with another text tower than it began with."""
    shutil.copytree("run", "changed", ignore=shutil.ignore_patterns(".lock"))
    record = json.loads(Path("changed/weights.json").read_text())
    for file in record["model.text_encoder.weights"]["files"].values():
        file["sha256"] = "0" * 64
    Path("changed/weights.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert launch([*SMALL, *NEEDS, "train.max_steps=2", "run.dir=changed"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "its files changed since this run started" in said
    assert f"the commit {COMMIT} behind an @" in said


def pushed_with_a_card(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export the run with a push, large files by the protocol of git-lfs (that of Xet needs Xet's own server)."""
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    Path("run/export/notes.txt").write_text("not ours")
    assert export(ExportArgs(source="run", format=["comfyui"], push="me/mine")) == 0
    assert [(each["name"], each["organization"], each["visibility"]) for each in hub.made] == [
        ("mine", "me", "private")
    ]
    files = {
        path.relative_to("run/export").as_posix(): path for path in Path("run/export").rglob("*") if path.is_file()
    }
    del files["notes.txt"], files["exported.json"], files["lora/.cascade_train.json"]
    assert {"README.md", "lora/adapter_model.safetensors", "lora.comfyui.safetensors"} <= files.keys()
    assert hub.pushed["me/mine"] == {name: path.read_bytes() for name, path in files.items()}
    assert hub.stored, "large files went apart"
    card = ModelCard(Path("run/export/README.md").read_text())
    assert card.data.base_model == "owner/name"
    assert "batches of 8" in card.text
    with pytest.raises(ConfigError, match="push=mine is no repository of the hub. Write it user/name"):
        ExportArgs(source="run", push="mine")
    with pytest.raises(ConfigError, match="out=a.safetensors names a folder, whose files are named"):
        ExportArgs(source="run", out="a.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c_3"], "model=c_3: no such option. Did you mean c_3b?"),
        (["c_tiny", "model=c_3b"], "c_tiny and model=c_3b both name a model. Leave one out."),
        ([], "download needs models: cascade-train download c_3b."),
        (["c_tiny", "model.weights=owner/other:prior"], "RepositoryNotFoundError"),
        (["c_tiny", f"model.weights={PINNED}:absent.safetensors"], "has no absent.safetensors; name another file"),
        (["incepton"], "model=incepton: no such option. Did you mean inception?"),
        (["c_tiny", "--config-dir", "nowhere"], "--config-dir nowhere: no such folder."),
        (["c_tiny", "--config"], "Overrides are key=value, without dashes"),
    ],
)
def test_what_cannot_be_downloaded_is_refused_with_code_2(
    hub: Hub, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["download", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_disk_without_room_is_refused_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cascade_train.commands.download.free_bytes", lambda folder: 1000)
    assert launch(["download", *NEEDS]) == 2
    assert "has no room for that. Free space, or set HF_HOME" in capsys.readouterr().err
    assert not fetched(hub)


def test_a_damaged_file_is_found_and_downloaded_again(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults.extend(["wrong"])
    needs = ["download", "c_tiny", f"model.weights={PINNED}:prior"]
    assert launch(needs) == 0
    assert "1 files match their hashes" in capsys.readouterr().out
    hub.faults.extend(["wrong"] * 2)
    find_weight_files(f"{PINNED}:prior")[0].write_bytes(b"damaged")
    assert launch(needs) == 2
    assert "checksum mismatch of prior/" in capsys.readouterr().err


def test_models_of_a_folder_of_ones_own_are_downloaded_too(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my conf" / "model").mkdir(parents=True)
    text = f"defaults:\n  - c_tiny\n  - _self_\n\nweights: {PINNED}:prior\n"
    (tmp_path / "my conf" / "model" / "mine.yaml").write_text(text)
    assert launch(["download", "mine", "--config-dir", "my conf", "dry_run=true"]) == 0
    assert "to fetch  owner/name@cccccccccccc:prior/" in capsys.readouterr().out
    assert launch(["download", "task=finetune", "model=mine", "--config-dir=my conf", "dry_run=true"]) == 0
    assert "to fetch  owner/name@cccccccccccc:prior/" in capsys.readouterr().out


def test_the_networks_of_evaluations_are_downloaded_and_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors", "preprocessor_config.json", "vocab.json", "inception.pth"):
        hub.files[f"clip/{name}"] = name.encode() * 400
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    content = hub.files["clip/inception.pth"]
    file = WebFile(
        f"{hub.url}/owner/name/resolve/main/clip/inception.pth", hashlib.sha256(content).hexdigest(), len(content)
    )
    assert {name: key for name, (key, _) in NETWORKS.items()} == {
        "inception": "features",
        "clip": "clip",
        "vgg16": "lpips",
    }
    monkeypatch.setitem(NETWORKS, "inception", ("features", file))
    monkeypatch.setitem(NETWORKS, "clip", ("clip", dataclasses.replace(CLIP, source=f"{PINNED}:clip")))
    assert launch(["download", "inception", "clip"]) == 0
    said = capsys.readouterr().out
    assert "5 files match their hashes" in said
    assert f"evaluate takes features={file.path}\n" in said
    folder = Path(said.partition("evaluate takes clip=")[2].strip())
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "preprocessor_config.json", "vocab.json",
    }  # fmt: skip
    assert launch(["download", "inception", "clip"]) == 0
    assert "to fetch" not in capsys.readouterr().out
    file.path.unlink()
    hub.faults.extend(["wrong"])
    assert launch(["download", "inception"]) == 2
    assert "invalid hash value" in capsys.readouterr().err
