"""Text towers that other trainers train beside Stable Diffusion's network train here too, at their rates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.unit.config.recipes.test_systems import (
    EVERYDREAM,
    MINDONE,
    ONETRAINER,
    OPTIMIZER,
    VALIDATION,
    imported,
)

FIRST, SECOND = "model.text_encoder", "model.text_encoder_2"
KOHYA: dict[str, Any] = {"train_data_dir": "cats", "learning_rate": 1e-5, "resolution": 512}
XL = {**KOHYA, "pretrained_model_name_or_path": "sd_xl.safetensors"}
LORA = {**KOHYA, "network_module": "networks.lora", "network_dim": 4, "unet_lr": 1e-4}
ADAPTED = [".self_attn", ".mlp"]
SIMPLETUNER = {
    "model_type": "lora", "model_family": "sd1x", "learning_rate": 1e-4, "max_train_steps": 5, "num_train_epochs": 0,
    "train_text_encoder": True, "data_backend_config": None,
}  # fmt: skip


def values(cfg: DictConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return values of a configuration by their dotted keys."""
    return {key: OmegaConf.select(cfg, key, throw_on_missing=True) for key in keys}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({**KOHYA, "train_text_encoder": True}, {f"{FIRST}.train": True, f"{FIRST}.lr": None}),
        ({**KOHYA, "learning_rate_te": 5e-6}, {f"{FIRST}.train": True, f"{FIRST}.lr": 5e-6}),
        ({**KOHYA, "learning_rate_te": 0}, {f"{FIRST}.train": False, f"{FIRST}.lr": None}),
        ({**KOHYA, "train_text_encoder": False, "learning_rate_te": 5e-6}, {f"{FIRST}.train": False}),
        (KOHYA, {f"{FIRST}.train": False}),
        (
            {**XL, "train_text_encoder": True, "learning_rate_te1": 1e-6, "learning_rate_te2": 0},
            {f"{FIRST}.train": True, f"{FIRST}.lr": 1e-6, f"{SECOND}.train": False, f"{SECOND}.lr": None},
        ),
        (
            {**XL, "train_text_encoder": True, "learning_rate_te2": 2e-6},
            {f"{FIRST}.train": True, f"{FIRST}.lr": None, f"{SECOND}.train": True, f"{SECOND}.lr": 2e-6},
        ),
        (LORA, {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 1e-5, "task.module_filters": [".attentions."]}),
        ({**LORA, "text_encoder_lr": 5e-5}, {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 5e-5}),
        ({**LORA, "text_encoder_lr": 0}, {"task.text_encoder_filters": None, f"{FIRST}.lr": None}),
        ({**LORA, "network_train_unet_only": True}, {"task.text_encoder_filters": None, f"{FIRST}.lr": None}),
        (
            {**XL, **LORA, "text_encoder_lr": [1e-6, 2e-6]},
            {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 1e-6, f"{SECOND}.lr": 2e-6},
        ),
        ({**XL, **LORA, "cache_text_encoder_outputs": True}, {"task.text_encoder_filters": None}),
        ({**KOHYA, "clip_skip": 2}, {f"{FIRST}.hidden_layer": -2}),
        ({**XL, "clip_skip": 2}, {f"{FIRST}.hidden_layer": -2, f"{SECOND}.hidden_layer": -2}),
        (
            {**ONETRAINER, "model_type": "STABLE_DIFFUSION_XL_10_BASE", "text_encoder_2_layer_skip": 1},
            {f"{FIRST}.hidden_layer": -2, f"{SECOND}.hidden_layer": -3},
        ),
        ({**SIMPLETUNER, "validation_negative_prompt": "ugly"}, {"sample.negative_prompt": "ugly"}),
        ({**XL, **LORA, "max_token_length": 225}, {f"{FIRST}.long_captions": True, f"{SECOND}.long_captions": True}),
        ({**SIMPLETUNER, "model_type": "full", "text_encoder_lr": 1e-6}, {f"{FIRST}.train": True, f"{FIRST}.lr": 1e-6}),
        (SIMPLETUNER, {"task.text_encoder_filters": [".self_attn"], f"{FIRST}.lr": None}),
        (
            {**ONETRAINER, "model_type": "STABLE_DIFFUSION_15", "layer_filter": "attentions, time"},
            {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 1e-5, "task.module_filters": ["attentions", "time"]},
        ),
        (
            {**ONETRAINER, "model_type": "STABLE_DIFFUSION_15", "training_method": "FINE_TUNE"},
            {f"{FIRST}.train": True, f"{FIRST}.lr": 1e-5},
        ),
        (
            {**ONETRAINER, "model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "FINE_TUNE"},
            {f"{FIRST}.train": True, f"{FIRST}.lr": 1e-5, f"{SECOND}.train": False},
        ),
    ],
)  # fmt: skip
def test_a_file_of_stable_diffusion_trains_its_text_towers(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    system = "simpletuner" if given.get("model_family") else None
    more = [f"system={system}"] if system else []
    places = ("data.path=cats",) if system else ()
    cfg = imported(tmp_path, {"train.json": given}, *more, more=places)
    assert values(cfg, expected) == expected


def test_what_a_trainer_does_by_itself_is_left_out_with_our_behaviour(tmp_path: Path) -> None:
    cfg = imported(tmp_path, {"train.json": LORA}, "behaviour=ours")
    assert cfg.task.text_encoder_filters is cfg.model.text_encoder.lr is None


def test_adapters_in_one_of_two_towers_are_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = imported(tmp_path, {"train.json": {**XL, **LORA, "text_encoder_lr": [1e-6, 0]}})
    assert cfg.task.text_encoder_filters is cfg.model.text_encoder.lr is None
    assert "text_encoder_lr: adapters go into both text towers, or none" in capsys.readouterr().out


@pytest.mark.parametrize(("frozen", "trains"), [(False, True), (True, False), (None, True)])
def test_everydream_trains_the_text_tower_unless_it_says_no(frozen: bool | None, trains: bool, tmp_path: Path) -> None:
    given = {**EVERYDREAM, "disable_textenc_training": frozen, "resume_ckpt": "sd_v1-5_vae.ckpt"}
    given = {key: value for key, value in given.items() if value is not None and key != "enable_zero_terminal_snr"}
    files = {"train.json": given, "optimizer.json": OPTIMIZER, "validation.json": VALIDATION}
    cfg = imported(tmp_path, files)
    assert (cfg.model.text_encoder.train, cfg.model.text_encoder.lr) == (trains, 5e-7 if trains else None)


def test_mindones_trainable_embedders_are_towers_that_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedders = (
        "    conditioner_config: {params: {emb_models: [{is_trainable: true, target: gm.FrozenOpenCLIPEmbedder2}]}}\n"
    )
    flags = "flags=--data_path coco"
    whole = MINDONE.replace("UNetModel_lora", "UNetModel").replace("    loss_fn", f"{embedders}    loss_fn")
    model = imported(tmp_path, {"x.yaml": whole}, flags).model
    assert (model.text_encoder.train, model.text_encoder_2.train) == (False, True)
    adapters = MINDONE.replace("    loss_fn", f"{embedders}    loss_fn")
    cfg = imported(tmp_path, {"x.yaml": adapters}, flags)
    assert cfg.task.text_encoder_filters is None
    assert "adapters of text towers: task.text_encoder_filters=[.self_attn]" in capsys.readouterr().out
