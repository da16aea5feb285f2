"""An exported prior loads and samples in diffusers, predicts what ours does, and a bad one never appears."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableCascadePriorPipeline
from safetensors import SafetensorError
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from cascade_train.errors import RunError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.formats import export_pipelines
from cascade_train.models.cascade.formats.export_pipelines import save_prior
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export import build_plain_network, model_spec, replaced_directory, replaced_file
from cascade_train.models.formats.weights import load_state
from cascade_train.models.text_encoder import PACKAGED_TOKENIZER
from cascade_train.results.find import stored_network
from tests.unit.models.small_networks import empty_network, predict, small_network

MAX_TOKENS = 12


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "projection_dim"), 24)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": MAX_TOKENS}
    config = CLIPTextConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    return CLIPTextModelWithProjection(config).eval()


@pytest.fixture(scope="module")
def network() -> CascadeUNet:
    return small_network()


@pytest.fixture(scope="module")
def parts(network: CascadeUNet) -> Any:
    tokenizer = CLIPTokenizer.from_pretrained(PACKAGED_TOKENIZER)
    encoder = SimpleNamespace(module=build_text_encoder(tokenizer), tokenizer=tokenizer, max_tokens=MAX_TOKENS)
    return SimpleNamespace(
        network=network,
        text_encoder=encoder,
        image_encoder=None,
        semantic_compressor=SimpleNamespace(stride=32, resolution_multiple=32.0),
        scheduler={"_class_name": "DDPMWuerstchenScheduler", "s": 0.008},
        complete=lambda: None,
    )


@pytest.fixture(scope="module")
def folder(network: CascadeUNet, parts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "export" / "prior"
    assert 0.0 <= save_prior(parts, network.state_dict(), directory) < 1e-6
    assert (directory / "model_index.json").is_file()
    return directory


def test_the_pipeline_of_diffusers_loads_the_export_and_samples(folder: Path) -> None:
    pipeline = StableCascadePriorPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.tokenizer.model_max_length == MAX_TOKENS
    assert pipeline.config.resolution_multiple == 32.0

    def sample() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        output = pipeline(
            "a red circle", height=96, width=64, num_inference_steps=2, guidance_scale=2.0, generator=generator
        )
        return output.image_embeddings

    latent = sample()
    assert latent.shape == (1, 16, 3, 2)
    assert latent.isfinite().all()
    assert latent.std() > 0.1
    assert torch.equal(sample(), latent)


def test_the_folder_is_what_the_pipeline_of_diffusers_writes(folder: Path, tmp_path: Path) -> None:
    StableCascadePriorPipeline.from_pretrained(folder).save_pretrained(tmp_path)
    written, theirs = (sorted(p.relative_to(top) for p in top.rglob("*.*")) for top in (folder, tmp_path))
    assert {*written} - {*theirs} == {Path("tokenizer/merges.txt"), Path("tokenizer/vocab.json")}, "for transformers 4"
    for path in theirs:
        ours, expected = ((top / path).read_bytes() for top in (folder, tmp_path))
        if path.suffix == ".json":
            ours, expected = (_without_origin(json.loads(each)) for each in (ours, expected))
        assert ours == expected, path


def _without_origin(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out where a part was loaded from, which diffusers and transformers note."""
    origins = ("_name_or_path", "name_or_path", "is_local", "local_files_only")
    return {key: value for key, value in content.items() if key not in origins}


def test_the_exported_network_predicts_what_ours_does(folder: Path, network: CascadeUNet) -> None:
    loaded = StableCascadePriorPipeline.from_pretrained(folder).prior
    assert type(loaded) is not type(network)
    torch.testing.assert_close(predict(loaded), predict(network), atol=1e-6, rtol=0)


@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_run_with_an_export_is_weights_again(folder: Path, network: CascadeUNet, up: int) -> None:
    fresh = empty_network()
    load_state(fresh, str([folder, *folder.parents][up]), dtype=torch.float32)
    assert torch.equal(predict(fresh), predict(network))


def test_an_image_tower_goes_along_with_its_processor(network: CascadeUNet, parts: Any, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "projection_dim"), 16)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes)).eval()
    save_prior(
        SimpleNamespace(**(vars(parts) | {"image_encoder": SimpleNamespace(module=tower)})),
        {name: value.bfloat16() for name, value in network.state_dict().items()},
        tmp_path / "prior",
    )
    pipeline = StableCascadePriorPipeline.from_pretrained(tmp_path / "prior")
    assert pipeline.feature_extractor.crop_size == {"height": 28, "width": 28}
    assert pipeline.image_encoder.config.image_size == 28


def test_a_new_export_replaces_the_old_one_whole_and_prints_nothing(
    network: CascadeUNet, parts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prior").mkdir()
    (tmp_path / "prior" / "stale.txt").touch()
    save_prior(parts, network.state_dict(), tmp_path / "prior")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prior"]
    assert not (tmp_path / "prior" / "stale.txt").exists()
    assert capfd.readouterr() == ("", "")


def test_a_prior_that_reads_back_differently_never_appears(
    network: CascadeUNet, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = export_pipelines.StableCascadeUNet.from_pretrained

    def damaged(path: Path, torch_dtype: torch.dtype) -> torch.nn.Module:
        loaded = read(path, torch_dtype=torch_dtype)
        loaded.embedding[1].bias.data[3] += 1e-3
        return loaded

    monkeypatch.setattr(export_pipelines.StableCascadeUNet, "from_pretrained", damaged)
    (tmp_path / "prior").mkdir()
    with pytest.raises(RunError, match="embedding.1.bias reads back differently from what was written"):
        save_prior(parts, network.state_dict(), tmp_path / "prior")
    assert [path.name for path in tmp_path.rglob("*")] == ["prior"]


def test_a_state_that_does_not_fit_the_config_is_not_written(parts: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        save_prior(parts, {}, tmp_path / "prior")
    assert not list(tmp_path.iterdir())


def test_a_plain_network_shares_the_memory_of_its_state(network: CascadeUNet) -> None:
    state = network.state_dict()
    plain = build_plain_network(CASCADE, network.config, state)
    assert plain.clip_txt_mapper.weight.data_ptr() == state["clip_txt_mapper.weight"].data_ptr()
    assert build_plain_network(CASCADE, network.config, None).clip_txt_mapper.weight.is_meta


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device (os error 28)")],
)
@pytest.mark.parametrize("replaced", [replaced_file, replaced_directory])
def test_a_full_disk_is_said_with_the_room_that_is_left_and_what_was_there_stays(
    tmp_path: Path, replaced: Callable[[Path], AbstractContextManager[Path]], error: Exception
) -> None:
    out = tmp_path / "out"
    if replaced is replaced_directory:
        (out / "kept").mkdir(parents=True)
    else:
        out.write_text("before")
    message = r"out could not be written: .*No space left.* \(\d+.\d+ GiB are free there\). Free"
    with pytest.raises(RunError, match=message), replaced(out):
        raise error
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["out", *["kept"] * out.is_dir()]


NAMES = {
    "sd15": ("stable-diffusion-v1", "sd_v1", "512x512"),  # sd-scripts 48d368f, library/sai_model_spec.py:70
    "sd21_base": ("stable-diffusion-v2-512", "sd_v2", "512x512"),  # :71
    "sd21": ("stable-diffusion-v2-768-v", "sd_v2_v", "768x768"),  # :72, and library/model_util.py:1081
    "sdxl": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0", "1024x1024"),  # :73, and library/sdxl_model_util.py:19
    "c_3b": ("stable-cascade-v1-stage-c", None, "1024x1024"),  # SwarmUI, T2IModelClassSorter
    "b_3b": ("stable-cascade-v1-stage-b", None, "1024x1024"),
}
"""Model -> architecture, base version, resolution."""


@pytest.mark.parametrize("model", NAMES)
def test_a_header_names_the_model_as_its_readers_do(model: str) -> None:
    architecture, version, resolution = NAMES[model]
    network = stored_network("any", model=model, key="from")
    family, config = network.family, dict(network.config)
    for is_lora, ending in ((False, ""), (True, "/lora")):
        own = family.model_spec(config, is_lora=is_lora, prediction=None)
        found = model_spec(own, "mine", is_lora=is_lora)
        assert found["modelspec.architecture"] == architecture + ending
        assert found.get("ss_base_model_version") == version
        assert (found["modelspec.title"], found["modelspec.resolution"]) == ("mine", resolution)
        assert found["modelspec.sai_model_spec"] == "1.0.1"  # :115
    predicts = None if version is None else "v" if version.endswith("_v") else "epsilon"  # :118
    assert found.get("modelspec.prediction_type") == predicts
