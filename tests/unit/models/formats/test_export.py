"""An exported prior loads and samples in diffusers, predicts what ours does, and a bad one never appears."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableCascadePriorPipeline
from safetensors import SafetensorError

from cascade_train.errors import RunError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.formats import export_pipelines
from cascade_train.models.cascade.formats.export_pipelines import save_prior
from cascade_train.models.formats.export import (
    build_plain_network,
    fixed_prediction,
    replaced_directory,
    replaced_file,
)
from cascade_train.models.formats.weights import load_state
from tests.unit.models.cascade.test_stage_c import TINY_VISION
from tests.unit.models.stages import build_stage

predicted = partial(fixed_prediction, CASCADE)


@pytest.fixture(scope="module")
def stage() -> Any:
    built = build_stage("c_tiny", {"image_encoder": TINY_VISION})
    built.scheduler = {"_class_name": "DDPMWuerstchenScheduler", "s": 0.008}
    return built


@pytest.fixture(scope="module")
def folder(stage: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "export" / "prior"
    assert 0.0 <= save_prior(stage, stage.network.state_dict(), directory) < 1e-6
    assert (directory / "model_index.json").is_file()
    return directory


def test_the_pipeline_of_diffusers_loads_the_export_and_samples(stage: Any, folder: Path) -> None:
    pipeline = StableCascadePriorPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.tokenizer.model_max_length == stage.text_encoder.max_tokens
    assert pipeline.config.resolution_multiple == 32.0
    assert pipeline.feature_extractor.crop_size == {"height": 28, "width": 28}
    assert pipeline.image_encoder.config.image_size == 28

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
    written, theirs = (sorted(p.relative_to(top) for p in top.rglob("[!.]*.*")) for top in (folder, tmp_path))
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


def test_the_exported_network_predicts_what_ours_does(stage: Any, folder: Path) -> None:
    loaded = StableCascadePriorPipeline.from_pretrained(folder).prior
    assert type(loaded) is not type(stage.network)
    torch.testing.assert_close(predicted(loaded), predicted(stage.network), atol=1e-6, rtol=0)


@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_run_with_an_export_is_weights_again(stage: Any, folder: Path, up: int) -> None:
    fresh = stage.network_config.build().eval()
    load_state(fresh, str([folder, *folder.parents][up]), dtype=torch.float32)
    assert torch.equal(predicted(fresh), predicted(stage.network))


def test_a_new_export_leaves_other_files_alone_and_prints_nothing(
    stage: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prior").mkdir()
    (tmp_path / "prior" / "notes.txt").touch()
    save_prior(stage, stage.network.state_dict(), tmp_path / "prior")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prior"]
    assert (tmp_path / "prior" / "notes.txt").exists()
    assert capfd.readouterr() == ("", "")


def test_a_prior_that_reads_back_differently_never_appears(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = export_pipelines.StableCascadeUNet.from_pretrained

    def damaged(path: Path, torch_dtype: torch.dtype) -> torch.nn.Module:
        loaded = read(path, torch_dtype=torch_dtype)
        loaded.embedding[1].bias.data[3] += 1e-3
        return loaded

    monkeypatch.setattr(export_pipelines.StableCascadeUNet, "from_pretrained", damaged)
    (tmp_path / "prior").mkdir()
    with pytest.raises(RunError, match="embedding.1.bias reads back differently from what was written"):
        save_prior(stage, stage.network.state_dict(), tmp_path / "prior")
    assert [path.name for path in tmp_path.rglob("*")] == ["prior"]


def test_a_state_that_does_not_fit_the_config_is_not_written(stage: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        save_prior(stage, {}, tmp_path / "prior")
    assert not list(tmp_path.iterdir())


def test_a_plain_network_shares_the_memory_of_its_state(stage: Any) -> None:
    state, config = stage.network.state_dict(), stage.network.config
    plain = build_plain_network(CASCADE, config, state)
    assert plain.clip_txt_mapper.weight.data_ptr() == state["clip_txt_mapper.weight"].data_ptr()
    assert build_plain_network(CASCADE, config, None).clip_txt_mapper.weight.is_meta


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
