"""A pipeline in one file has the original's names; diffusers and our stages load from it what the folder holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import load_file, save_file

from cascade_train.errors import ConfigError, RunError
from cascade_train.models.formats.weights import write_tensors
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from cascade_train.models.stable_diffusion.formats import single_file
from cascade_train.models.stable_diffusion.formats.original_names import unet_modules
from cascade_train.models.stable_diffusion.formats.single_file import save_single_file
from cascade_train.results.find import whole_pipeline
from tests.unit.models.stages import build_stage, make_stage, random_weights

KINDS = {"sd_tiny": StableDiffusionPipeline, "sdxl_tiny": StableDiffusionXLPipeline}
SD, XL = "transformer_blocks.0.attn2.to_k", "transformer_blocks.1.ff.net.0.proj"
PUBLISHED = {
    "sd15": {
        "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
        f"down_blocks.2.attentions.1.{SD}": f"input_blocks.8.1.{SD}",
        "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.2.1.conv",
        "up_blocks.1.upsamplers.0.conv": "output_blocks.5.2.conv",
        "up_blocks.3.resnets.2.conv_shortcut": "output_blocks.11.0.skip_connection",
        "conv_norm_out": "out.0",
    },
    "sdxl": {
        "add_embedding.linear_1": "label_emb.0.0",
        f"down_blocks.1.attentions.0.{XL}": f"input_blocks.4.1.{XL}",
        f"mid_block.attentions.0.{XL}": f"middle_block.1.{XL}",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
        "up_blocks.2.resnets.0.time_emb_proj": "output_blocks.6.0.emb_layers.1",
    },
}
"""Names in the published checkpoints."""


@pytest.fixture(scope="module", params=KINDS)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    stage, folder = build_stage(request.param, {"seed": 5}), tmp_path_factory.mktemp("single") / "run" / "export"
    stage.scheduler = {"_class_name": "DDIMScheduler", "steps_offset": 1, "clip_sample": False}
    stage.exports()["pipeline"](stage.network.state_dict(), folder / "pipeline")
    return request.param, folder / "pipeline"


@pytest.mark.parametrize("is_open_clip", [False, True])
def test_diffusers_loads_every_part_to_the_bit(
    pipeline: tuple[str, Path], is_open_clip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = pipeline
    monkeypatch.setattr(single_file, "OPEN_CLIP_WIDTH", 32 if is_open_clip else 1024)
    file = tmp_path / "model.safetensors"
    assert save_single_file(folder, file, dtype=None) == 0.0
    beginnings = {name.partition(".")[0] for name in load_file(file)}
    tower = "conditioner" if model == "sdxl_tiny" else "cond_stage_model"
    assert beginnings == {"model", "first_stage_model", tower}
    if model == "sd_tiny":
        assert ("cond_stage_model.model.text_projection" in load_file(file)) is False
        assert ("cond_stage_model.model.positional_embedding" in load_file(file)) is is_open_clip
    expected, found = KINDS[model].from_pretrained(folder), KINDS[model].from_single_file(file, config=str(folder))
    parts = ("unet", "vae", "text_encoder", *(("text_encoder_2",) if model == "sdxl_tiny" else ()))
    for part in parts:
        state = getattr(found, part).state_dict()
        wanted = getattr(expected, part).state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(value, state[name]) for name, value in wanted.items()), part


def test_towers_named_as_transformers_now_names_them_are_written_alike(
    pipeline: tuple[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pipeline[1], tmp_path / "renamed")
    file = folder / "text_encoder" / "model.safetensors"
    stored = load_file(file)
    assert all(name.startswith("text_model.") for name in stored), "as published"
    save_file({name.removeprefix("text_model."): each for name, each in stored.items()}, file, {"format": "pt"})
    for source, out in ((pipeline[1], "one.safetensors"), (folder, "other.safetensors")):
        save_single_file(source, tmp_path / out, dtype=None)
    published, renamed = (load_file(tmp_path / out) for out in ("one.safetensors", "other.safetensors"))
    assert published.keys() == renamed.keys()
    assert all(torch.equal(tensor, renamed[name]) for name, tensor in published.items())


def test_towers_of_one_width_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = {"text_encoder": {"hidden_size": 48, "num_attention_heads": 4}, "network": {"cross_attention_dim": 96}}
    stage = build_stage("sdxl_tiny", one)
    stage.scheduler = {"_class_name": "DDIMScheduler"}
    stage.exports()["pipeline"](stage.network.state_dict(), tmp_path / "one")
    save_single_file(tmp_path / "one", tmp_path / "one.safetensors", dtype=None)
    assert "both text towers have one width" in caplog.text


def test_the_dtype_can_be_chosen(pipeline: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_single_file(pipeline[1], tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half.safetensors").values()} == {torch.bfloat16}
    assert "both text towers" not in caplog.text, "theirs have two"


@pytest.mark.parametrize("model", PUBLISHED)
def test_names_of_published_sizes_are_the_originals(model: str) -> None:
    network = make_stage(model, random_weights()).network_config.build()
    modules = {name.rpartition(".")[0] for name in network.state_dict()}
    found = unet_modules(modules)
    assert PUBLISHED[model].items() <= found.items()
    assert len(set(found.values())) == len(found) == len(modules)
    stored = {f"model.diffusion_model.{found[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": name
              for name in network.state_dict()}  # fmt: skip
    again = convert_ldm_unet_checkpoint(dict(stored), dict(network.config))
    assert {name: name for name in network.state_dict()} == again


def weights_of(model: str, source: Path, **towers: Any) -> dict[str, Any]:
    names = ("text_encoder", "text_encoder_2", "vae") if model == "sdxl_tiny" else ("text_encoder", "vae")
    parts = {name: {"weights": str(source), **towers.get(name, {})} for name in names}
    return {"weights": str(source), "random_encoders": False, **parts}


def test_our_stages_load_every_part_of_a_file_and_of_a_folder(pipeline: tuple[str, Path], tmp_path: Path) -> None:
    (model, folder), file = pipeline, tmp_path / "model.safetensors"
    save_single_file(folder, file, dtype=None)
    save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file)
    stage, towers = build_stage(model, {"seed": 5}), ("text_encoder", "text_encoder_2")
    expected = {"network": stage.network, **stage.frozen_modules()}
    assert len(expected) == (4 if model == "sdxl_tiny" else 3)
    for source in (file, folder, folder.parent.parent):
        of_parts = {} if source == file else {name: {"subfolder": name} for name in towers}
        found = build_stage(model, weights_of(model, source, **of_parts))
        for name, module in {"network": found.network, **found.frozen_modules()}.items():
            wanted, more = expected[name].state_dict(), 0.5 if source == file else 0.0
            assert all(torch.equal(tensor, wanted[key] + more) for key, tensor in module.state_dict().items()), name


def test_a_file_without_a_tower_says_so(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    changes = {"random_encoders": False, "text_encoder": {"weights": str(tmp_path / "other.safetensors")}}
    with pytest.raises(ConfigError, match="this file holds no such tower; name another"):
        build_stage("sd_tiny", {**changes, "vae": {"weights": "a"}})


def test_a_pipeline_is_found_in_runs_and_exports(pipeline: tuple[str, Path], tmp_path: Path) -> None:
    folder = pipeline[1]
    for source in (folder, folder.parent, folder.parent.parent):
        family, found, model = whole_pipeline(str(source)) or (None, None, None)
        assert (family, found) == (STABLE_DIFFUSION, folder)
        assert model in ("sd15", "sdxl")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableCascadePriorPipeline"}')
    assert whole_pipeline(str(tmp_path)) is None


def test_what_is_missing_or_damaged_is_said(
    pipeline: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pipeline[1]
    (tmp_path / "half").mkdir()
    for part in ("unet", "vae"):
        (tmp_path / "half" / part).symlink_to(folder / part)
    with pytest.raises(ConfigError, match="the pipeline has no text_encoder, so that one file cannot hold it"):
        save_single_file(tmp_path / "half", tmp_path / "out.safetensors", dtype=None)

    def damaged(file: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        first = next(iter(tensors))
        write_tensors(file, {**tensors, first: tensors[first] + 1}, metadata)

    monkeypatch.setattr(single_file, "write_tensors", damaged)
    with pytest.raises(RunError, match="reads back differently from what was written"):
        save_single_file(folder, tmp_path / "out.safetensors", dtype=None)
    assert not (tmp_path / "out.safetensors").exists()
