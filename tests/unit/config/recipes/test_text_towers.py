"""Text towers that other trainers train beside Stable Diffusion's network train here too, at their rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cascade_train.__main__ import launch
from tests.unit.config.recipes.test_systems import (
    EVERYDREAM,
    MINDONE,
    ONETRAINER,
    OPTIMIZER,
    VALIDATION,
    check,
    imported,
)

FIRST, SECOND = "model.text_encoder", "model.text_encoder_2"
KOHYA: dict[str, Any] = {
    "pretrained_model_name_or_path": "sd_v1-5_vae.safetensors", "train_data_dir": "cats", "learning_rate": 1e-5,
    "resolution": 512,
}  # fmt: skip
XL = {**KOHYA, "pretrained_model_name_or_path": "sd_xl.safetensors"}
LORA = {**KOHYA, "network_module": "networks.lora", "network_dim": 4, "unet_lr": 1e-4}
ADAPTED = [".self_attn", ".mlp"]
SIMPLETUNER = {
    "model_type": "lora", "model_family": "sd1x", "learning_rate": 1e-4, "max_train_steps": 5, "num_train_epochs": 0,
    "train_text_encoder": True, "data_backend_config": None,
}  # fmt: skip


def onetrainer(kind: str, method: str, **parts: Any) -> dict[str, Any]:
    """Return a file of OneTrainer's with parts of its own."""
    mine = {key: value for key, value in ONETRAINER.items() if not key.startswith(("text_encoder", "unet", "prior"))}
    return {**mine, "model_type": kind, "training_method": method, "learning_rate": 1e-4, **parts}


IGNORED = 7e-6
"""A rate that nothing trains by."""
TRAINED = {"train": True, "learning_rate": IGNORED}
CASES: list[tuple[Any, ...]] = [
    ({**KOHYA, "train_text_encoder": True}, {f"{FIRST}.train": True, f"{FIRST}.lr": None}),
    ({**KOHYA, "learning_rate_te": 5e-6}, {f"{FIRST}.train": True, f"{FIRST}.lr": 5e-6}),
    ({**KOHYA, "learning_rate_te": 0}, {f"{FIRST}.train": False, f"{FIRST}.lr": None}),
    ({**KOHYA, "train_text_encoder": False, "learning_rate_te": 5e-6}, {f"{FIRST}.train": False}),
    (KOHYA, {f"{FIRST}.train": True, f"{FIRST}.lr": None}),  # train_db.py:172
    ({**KOHYA, "stop_text_encoder_training": 9}, {f"{FIRST}.train": True, f"{FIRST}.lr": None,
                                                  f"{FIRST}.stop_after": 9}),
    ({**KOHYA, "stop_text_encoder_training": 0}, {f"{FIRST}.train": False}),
    ({**KOHYA, "stop_text_encoder_training": -1, "learning_rate_te": 5e-6}, {f"{FIRST}.train": False}),
    ({**XL, "learning_rate_te1": 5e-6}, {f"{FIRST}.train": False, f"{SECOND}.train": False}),
    ({**LORA, "text_encoder_lr": []}, {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 1e-5}),
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
        {**LORA, **XL, "text_encoder_lr": [1e-6, 2e-6]},
        {"task.text_encoder_filters": ADAPTED, f"{FIRST}.lr": 1e-6, f"{SECOND}.lr": 2e-6},
    ),
    ({**LORA, **XL, "cache_text_encoder_outputs": True}, {"task.text_encoder_filters": None}),
    ({**KOHYA, "clip_skip": 2}, {f"{FIRST}.hidden_layer": -2}),
    ({**XL, "clip_skip": 2}, {f"{FIRST}.hidden_layer": -2, f"{SECOND}.hidden_layer": -2}),
    (
        {**ONETRAINER, "model_type": "STABLE_DIFFUSION_XL_10_BASE", "text_encoder_2_layer_skip": 1},
        {f"{FIRST}.hidden_layer": -2, f"{SECOND}.hidden_layer": -3},
    ),
    ({**SIMPLETUNER, "validation_negative_prompt": "ugly"}, {"sample.negative_prompt": "ugly"}),
    ({**LORA, **XL, "max_token_length": 225}, {f"{FIRST}.long_captions": True, f"{SECOND}.long_captions": True}),
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
        {f"{FIRST}.train": True, f"{FIRST}.lr": 1e-5, f"{SECOND}.train": True},
    ),
    ({**LORA, **XL, "text_encoder_lr": [1e-6, 0]}, {"task.text_encoder_filters": None, f"{FIRST}.lr": None},
     "text_encoder_lr: adapters go into both text towers, or none"),
    ({**XL, "train_text_encoder": True, "learning_rate_te": IGNORED}, {}, "  learning_rate_te: no text tower trains"),
    ({**KOHYA, "train_text_encoder": True, "text_encoder_lr": IGNORED}, {}, "  text_encoder_lr: no text tower trains"),
    ({**LORA, "text_encoder_lr": 1e-6, "learning_rate_te": IGNORED}, {}, "  learning_rate_te: no text tower trains"),
    (onetrainer("STABLE_DIFFUSION_15", "FINE_TUNE", unet={"learning_rate": 3e-4}),
     {"optimizer.lr": 3e-4, f"{FIRST}.train": True, f"{FIRST}.lr": 1e-4}),
    (onetrainer("STABLE_DIFFUSION_XL_10_BASE", "LORA", text_encoder={"train": False}, text_encoder_2=TRAINED), {},
     "text_encoder_2.learning_rate, text_encoder_2.train: adapters go into both text towers, or none"),
    (onetrainer("STABLE_DIFFUSION_15", "FINE_TUNE", text_encoder={"train": True}, text_encoder_2=TRAINED), {},
     "  text_encoder_2.learning_rate, text_encoder_2.train: no text tower trains by it"),
]  # fmt: skip
"""A file, what its recipe has, and what the report says, if anything."""


@pytest.mark.parametrize(("given", "expected", "said"), [(*case, "")[:3] for case in CASES])
def test_a_file_of_stable_diffusion_trains_its_text_towers(
    given: dict[str, Any], expected: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_simpletuner = "model_family" in given
    system, places = (["system=simpletuner"], ("data.path=cats",)) if is_simpletuner else ([], ())
    check(imported(tmp_path, {"train.json": given}, *system, more=places), expected)
    report = capsys.readouterr().out
    assert said in report
    assert str(IGNORED) not in report


def test_what_a_trainer_does_by_itself_is_left_out_with_our_behaviour(tmp_path: Path) -> None:
    cfg = imported(tmp_path, {"train.json": LORA}, "behaviour=ours")
    assert cfg.task.text_encoder_filters is cfg.model.text_encoder.lr is None


@pytest.mark.parametrize("rate", ["fast", True])
def test_a_rate_that_is_none_is_refused_by_its_key(
    rate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**LORA, "text_encoder_lr": rate}))
    assert launch(["recipe", "import", str(tmp_path / "a.json"), f"out={tmp_path}/experiment/a.yaml"]) == 2
    assert "text_encoder_lr: of another type than its trainer reads" in capsys.readouterr().err


def test_a_stop_of_onetrainers_tower_leads_to_our_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {
        "text_encoder": {"train": True, "stop_training_after": 7, "stop_training_after_unit": "EPOCH"},
        "unet": {"stop_training_after": 7, "stop_training_after_unit": "NEVER"},
    }
    imported(tmp_path, {"train.json": onetrainer("STABLE_DIFFUSION_15", "LORA", **parts)})
    said = capsys.readouterr().out
    assert "text_encoder.stop_training_after: model.text_encoder.stop_after takes optimizer steps" in said
    assert "unet.stop_training_after" in said.partition("The same")[2].partition("Not needed")[0]


@pytest.mark.parametrize(("frozen", "rate"), [(False, 5e-7), (True, 5e-7), (None, 5e-7), (False, None)])
def test_everydream_trains_the_text_tower_unless_it_says_no(
    frozen: bool | None, rate: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**EVERYDREAM, "disable_textenc_training": frozen, "resume_ckpt": "sd_v1-5_vae.ckpt"}
    given = {key: value for key, value in given.items() if value is not None and key != "enable_zero_terminal_snr"}
    own = {**OPTIMIZER, "text_encoder_overrides": {"lr": rate}}
    cfg = imported(tmp_path, {"train.json": given, "optimizer.json": own, "validation.json": VALIDATION})
    assert (cfg.model.text_encoder.train, cfg.model.text_encoder.lr) == (not frozen, None if frozen else rate)
    is_open = "optimizer.text_encoder_overrides.lr: nothing is set" in capsys.readouterr().out
    assert is_open is (rate is None)


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
