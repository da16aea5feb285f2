"""A whole model in one file, under the original's names, is the model that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from tests.unit.models.stable_diffusion.formats.ldm_names import clip_tensors, open_clip_tensors, unet_name, vae_tensors
from tests.unit.models.stages import build_stage

SD, XL = "cond_stage_model.transformer.", "conditioner.embedders.0.transformer."


@pytest.fixture(scope="module", params=["sd_tiny", "sdxl_tiny"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    stage, file = build_stage(request.param, {"seed": 5}), tmp_path_factory.mktemp("single") / "model.safetensors"
    network = {unet_name(name, 1): tensor for name, tensor in stage.network.state_dict().items()}
    assert len(network) == len(stage.network.state_dict())
    is_xl = request.param == "sdxl_tiny"
    towers = clip_tensors(stage.text_encoder.module.state_dict(), XL if is_xl else SD)
    if is_xl:
        towers |= open_clip_tensors(stage.text_encoder_2.module.state_dict(), "conditioner.embedders.1.model.")
    whole = network | vae_tensors(stage.vae.module.state_dict(), 3) | towers
    save_file({name: (tensor + 0.5).contiguous() for name, tensor in whole.items()}, file)
    return request.param, stage, file


def test_every_part_has_the_values_of_the_file(stored: tuple[str, Any, Path]) -> None:
    model, stage, file = stored
    found = build_stage(model, {"weights": str(file), "random_encoders": False, **parts(model, file)})
    pairs = [(stage.network, found.network)]
    pairs += [(module, found.frozen_modules()[name]) for name, module in stage.frozen_modules().items()]
    assert len(pairs) == (4 if model == "sdxl_tiny" else 3)
    for first, loaded in pairs:
        state = loaded.state_dict()
        assert all(torch.equal(state[name], tensor + 0.5) for name, tensor in first.state_dict().items())


def parts(model: str, file: Path) -> dict[str, Any]:
    names = ("text_encoder", "text_encoder_2", "vae") if model == "sdxl_tiny" else ("text_encoder", "vae")
    return {name: {"weights": str(file)} for name in names}


def test_a_pipelines_folder_has_every_part_too(tmp_path: Path) -> None:
    stage = build_stage("sdxl_tiny", {"seed": 5})
    stage.scheduler = {"_class_name": "DDIMScheduler"}
    stage.exports()["pipeline"](stage.network.state_dict(), tmp_path / "run" / "export" / "pipeline")
    towers = {name: {"subfolder": name} for name in ("text_encoder", "text_encoder_2")}
    for source in (tmp_path / "run", tmp_path / "run" / "export", tmp_path / "run" / "export" / "pipeline"):
        named = {name: {"weights": str(source), **towers.get(name, {})} for name in (*towers, "vae")}
        found = build_stage("sdxl_tiny", {"weights": str(source), "random_encoders": False, **named})
        state = found.network.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in stage.network.state_dict().items())
        for name, module in found.frozen_modules().items():
            expected = stage.frozen_modules()[name].state_dict()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in module.state_dict().items()), name


def test_a_file_without_a_tower_says_so(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    changes = {"random_encoders": False, "text_encoder": {"weights": str(tmp_path / "other.safetensors")}}
    with pytest.raises(ConfigError, match="this file holds no such tower; name another"):
        build_stage("sd_tiny", {**changes, "vae": {"weights": "a"}})
