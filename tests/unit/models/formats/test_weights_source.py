"""What a user writes for weights is found on disk, in a run or in the hub's cache, or refused with a remedy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest

from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource
from cascade_train.models.formats import weights_source
from cascade_train.models.formats.weights_source import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    WeightsSpec,
    find_files,
    find_part,
    find_weight_files,
    weights_found_once,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"

find_network = partial(find_weight_files, part=("prior", "decoder", "unet"))


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub whose cache lies in an empty folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cache(hub_cache: Path, repo: str, name: str) -> Path:
    folder = hub_cache / f"models--{repo.replace('/', '--')}"
    touch(folder / "refs" / "main").write_text("a" * 40)
    return touch(folder / "snapshots" / ("a" * 40) / name)


@pytest.mark.parametrize("inside", ["export/prior", "export/prior/prior", "prior", "."])
def test_weights_of_a_run_an_export_and_a_pipeline_are_found(tmp_path: Path, inside: str) -> None:
    file = touch(tmp_path / inside / WEIGHTS)
    touch(tmp_path / "metrics.jsonl") if "export" in inside else None
    assert find_network(str(tmp_path)) == [file]


def test_a_folder_that_is_itself_the_module_is_not_searched_for_parts(tmp_path: Path) -> None:
    file = touch(tmp_path / "model.safetensors")
    touch(tmp_path / "prior" / WEIGHTS)
    assert find_weight_files(str(tmp_path), part=None) == [file]


def test_full_precision_is_preferred_to_a_variant(tmp_path: Path) -> None:
    touch(tmp_path / "diffusion_pytorch_model.bf16.safetensors")
    assert find_network(str(tmp_path))[0].name == "diffusion_pytorch_model.bf16.safetensors"
    touch(tmp_path / WEIGHTS)
    assert find_network(str(tmp_path))[0].name == WEIGHTS


ONLY_LORA = "has left no export/prior, only lora; an adapter is no whole network, give"
CHECKPOINT = "is a checkpoint for resuming, in shards.*its run .*/run instead.*export from=.*/run step=8 out"


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        (["run/checkpoints/step_8/manifest.json"], "run/checkpoints/step_8", CHECKPOINT),
        (
            ["metrics.jsonl", "checkpoints/step_2/x"],
            "",
            "no export/prior; let it finish, or export its newest",
        ),
        (["export/lora/adapter_model.safetensors"], "", ONLY_LORA),
        (["export/lora/adapter_model.safetensors"], "export", ONLY_LORA),
        (["run/config.yaml"], "run", "has left no export/prior: this run has no checkpoint yet"),
        (["holiday.jpg"], "", f"no weights in this folder, looked for {WEIGHTS}.*found holiday.jpg"),
        (["weights.zip"], "weights.zip", "must end in one of .safetensors"),
    ],
)
def test_what_holds_no_network_is_refused(tmp_path: Path, files: list[str], source: str, message: str) -> None:
    for name in files:
        touch(tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        find_network(str(tmp_path / source))


def test_the_adapter_of_a_run_is_found(tmp_path: Path) -> None:
    file = touch(tmp_path / "export" / "lora" / "adapter_model.safetensors")
    assert find_part(tmp_path, "lora", "from") == file.parent


@pytest.mark.parametrize("source", ["/nowhere/c.safetensors", "models/c.safetensors", "c_3b"])
def test_a_path_that_does_not_exist_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=f"model.weights={source}: no such file or folder; give a path that exists"):
        find_network(source)


def test_a_cached_hub_id_is_found_offline(hub_cache: Path) -> None:
    file = cache(hub_cache, "owner/name", f"prior_lite/{WEIGHTS}")
    assert find_network("owner/name:prior_lite") == [file]


def test_a_cached_hub_id_in_shards_is_found_offline(hub_cache: Path) -> None:
    index = cache(hub_cache, "owner/name", f"prior/{WEIGHTS}.index.json")
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}')
    shards = [cache(hub_cache, "owner/name", f"prior/{name}.safetensors") for name in ("one", "two")]
    assert find_network("owner/name") == shards


def test_a_hub_id_is_looked_for_once_where_that_is_asked(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked, names = cache(hub_cache, "owner/name", f"prior/{WEIGHTS}"), [], weights_source.hub_names
    monkeypatch.setattr(weights_source, "hub_names", lambda spec: asked.append(spec) or names(spec))
    spec = WeightsSpec(key="model.weights", source="owner/name", part="prior")
    with weights_found_once():
        loaded = find_weight_files("owner/name", key="model.weights", part="prior")
        assert loaded == find_files(spec) == [file]
        assert len(asked) == 1
        with pytest.raises(ConfigError, match="not a path, and the download from the hub failed"):
            find_weight_files("owner/name", key="model.weights", part="decoder")
    assert find_files(spec) == [file]
    assert len(asked) == 3


def test_a_single_file_of_a_hub_id_is_found_offline(hub_cache: Path) -> None:
    file = cache(hub_cache, "owner/name", "previewer.safetensors")
    assert find_weight_files("owner/name:previewer.safetensors", part=None) == [file]
    root = cache(hub_cache, "owner/name", "model.safetensors")
    assert find_weight_files("owner/name", part=None) == [root]


@pytest.mark.parametrize("source", ["owner/absent", "owner/absent:prior", "owner/absent:one.safetensors"])
@pytest.mark.usefixtures("hub_cache")
def test_a_hub_id_that_cannot_be_had_is_refused_with_the_key_and_the_remedy(source: str) -> None:
    with pytest.raises(ConfigError, match=f"model.weights={source}: not a path, and the download .*download it where"):
        find_network(source)


def test_a_hub_repository_without_weights_in_the_subfolder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(source: HubSource, name: str, *, cached_only: bool) -> None:
        assert (source.repo, cached_only) == ("owner/name", False)
        asked.append(name)

    monkeypatch.setattr(HubSource, "look", answer)
    with pytest.raises(ConfigError, match="owner/name holds no weights in 'decoder'; name the subfolder after a colon"):
        find_network("owner/name:decoder")
    assert asked[0] == f"decoder/{WEIGHTS}"
    assert len(asked) == len(set(asked)) > 10


@pytest.mark.usefixtures("hub_cache")
def test_a_tower_and_a_tokenizer_are_found_with_what_lies_beside(hub_cache: Path, tmp_path: Path) -> None:
    names = ["text/config.json", "text/model.safetensors", "words/vocab.json", "words/merges.txt"]
    cached = [cache(hub_cache, "owner/name", name) for name in names]
    tower = WeightsSpec(key="k", source="owner/name", part="text", beside=CONFIG_FILES)
    tokenizer = WeightsSpec(key="k", source="owner/name", part="words", beside=TOKENIZER_FILES, weights=False)
    assert find_files(tower) + find_files(tokenizer) == cached
    local = [touch(tmp_path / "mine" / name) for name in names]
    here = [replace(spec, source=str(tmp_path / "mine")) for spec in (tower, tokenizer)]
    assert find_files(here[0]) + find_files(here[1]) == local


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "index.json is damaged"),
        ("{}", "has no weight_map of tensors to the files"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": "model.safetensors"}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "which is no file of weights beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is no file of weights beside it"),
        ('{"weight_map": {"a": ".."}}', "which is no file of weights beside it"),
        ('{"weight_map": {"a": "%s.pt"}}' % ("é" * 200), "which is no file of weights beside it"),
        ('{"weight_map": {"a": "%s"}}' % ("x" * 10_000), r"9800 characters ...\]x+', which is no file of weights"),
    ],
)
def test_an_index_names_files_beside_it_or_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        find_weight_files(str(tmp_path), part=None)
    assert len(str(caught.value)) < 1000
