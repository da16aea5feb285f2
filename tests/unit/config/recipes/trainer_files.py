"""Files of other trainers, whole but for what a test is about."""

from __future__ import annotations

from typing import Any

from tests.unit.config.recipes.test_systems import BACKENDS
from tests.unit.config.recipes.test_taken_over import ED, OT, OWN, ST

EDREAM = {key: value for key, value in ED.items() if key not in ("optimizer_config", "validation_config")}
EDREAM |= {"resume_ckpt": "sd_v1-5"}
TUNER = ST | {"model_family": "sdxl"}
CASCADE = ST | {"snr_gamma": None}
XL = OT | {"model_type": "STABLE_DIFFUSION_XL_10_BASE"}
WEIGHT, WEIGHTS = "objective.loss_weight", "cascade_train.diffusion.loss_weight"
DEBIASED = {f"{WEIGHT}._target_": f"{WEIGHTS}.DebiasedLossWeight"}
LR, ALGORITHM, DECAY = "lr_scheduler", "optimizer.algorithm", "optimizer.weight_decay"
PRODIGY = {DECAY: 0.0, f"{ALGORITHM}.bias_correction": False, f"{ALGORITHM}.safeguard_warmup": False}


def without(given: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in keys}


def backend(**changes: Any) -> dict[str, Any]:
    """Return a file of SimpleTuner's with one dataset, that cuts no pictures unless `changes` say so."""
    return TUNER | {"backends": [without(BACKENDS[0], "crop", "crop_style", "crop_aspect") | changes]}


def subsets(*own: dict[str, Any], **general: Any) -> dict[str, Any]:
    return without(OWN, "train_data_dir") | {"datasets": [{"subsets": [{"image_dir": "a"} | each for each in own]}],
                                             **{f"general.{key}": value for key, value in general.items()}}  # fmt: skip


def concepts(*own: dict[str, Any]) -> dict[str, Any]:
    return OT | {"concepts": [{"path": "a"} | each for each in own]}


def sizes(*sides: int) -> dict[str, Any]:
    datasets = [{"resolution": side, "subsets": [{"image_dir": name}]} for side, name in zip(sides, "ab", strict=True)]
    return without(OWN, "train_data_dir", "resolution") | {"datasets": datasets}


DROPS = {"tag_dropout_enable": True, "tag_dropout_probability": 0.3, "enable_tag_shuffling": True}
TAGS = "data.captions.tags"
CONSTANT = "cascade_train.engine.lr_schedule.ConstantSchedule"
TOWERS = without(OT, "text_encoder", "text_encoder_2") | {"epochs": 40}
ED1 = {"lightning.trainer.max_epochs": 3, "model.base_learning_rate": 1e-6, "data_root": "a"}
UNCUT = {"id": "a", "type": "local", "instance_data_dir": "a"}
