"""What a trainer does with averages, captions, schedules and several datasets, by its own source.

Every case names the file of the trainer's source that its values were read from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cascade_train.config.recipes.recipe import Kind
from tests.unit.config.recipes.test_edges import algorithm
from tests.unit.config.recipes.test_taken_over import OT, OWN, folder, told
from tests.unit.config.recipes.test_trainers_own import DECAY, EDREAM, LR, TUNER, WEIGHT, backend, subsets, without

assert callable(folder), "a fixture"


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

VALUES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # OneTrainer, modules/util/create.py: came_pytorch's decay is 0 unless the file says more
    ("onetrainer", algorithm("CAME"), {DECAY: 0.0}),
    # MGDS, DropTags, as modules/dataLoader/mixin/DataLoaderText2ImageMixin.py uses it: RANDOM drops single tags
    ("onetrainer", concepts({"text": DROPS | {"tag_dropout_mode": "RANDOM"}}), {f"{TAGS}.drop_prob": 0.3}),
    ("onetrainer", concepts({"text": DROPS | {"tag_dropout_mode": "FULL"}}), {f"{TAGS}.drop_prob": 0.0}),
    ("onetrainer", concepts({"text": DROPS}), {f"{TAGS}.drop_prob": 0.0}),
    (
        "onetrainer",
        concepts({"text": DROPS | {"tag_dropout_enable": False, "tag_dropout_mode": "RANDOM"}}),
        {f"{TAGS}.drop_prob": 0.0},
    ),
    # OneTrainer, modules/util/config/ConceptConfig.py: pictures are flipped unless the concept says no
    ("onetrainer", concepts({}), {"data.flip_prob": 0.5}),
    ("onetrainer", concepts({"image": {"enable_random_flip": False}}), {"data.flip_prob": 0.0}),
    ("onetrainer", concepts({"image": {"enable_fixed_flip": True}}), {"data.flip_prob": 1.0}),
    # OneTrainer, modules/util/create.py: schedule-free optimizers have a constant rate, without a warmup
    (
        "onetrainer",
        algorithm("SCHEDULE_FREE_ADAMW") | {"learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 50},
        {f"{LR}.warmup_steps": 1, f"{LR}._target_": CONSTANT},
    ),
    # sd-scripts, library/train_util.py: get_dummy_scheduler
    (
        "kohya",
        OWN | {"optimizer_type": "AdamWScheduleFree", "lr_scheduler": "cosine", "lr_warmup_steps": 50},
        {f"{LR}.warmup_steps": 1, f"{LR}._target_": CONSTANT},
    ),
    # sd-scripts, library/train_util.py: get_scheduler_fix passes the ratio to two schedules
    (
        "kohya",
        OWN | {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.1},
        {f"{LR}.min_factor": 0.1},
    ),
    ("kohya", OWN | {"lr_scheduler": "cosine", "lr_scheduler_min_lr_ratio": 0.1}, {f"{LR}.min_factor": 0.0}),
    ("kohya", OWN | {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 0.2}, {f"{LR}.decay_steps": 1000}),
    ("kohya", OWN | {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 200}, {f"{LR}.decay_steps": 200}),
    # EveryDream 2, train.py: divided by the SNR, whatever the network predicts
    (
        "everydream",
        EDREAM | {"resume_ckpt": "v2-1_768", "min_snr_gamma": 5.0},
        {f"{WEIGHT}.target": "epsilon", "objective.target._target_": "cascade_train.diffusion.target.VTarget"},
    ),
    # sd-scripts, library/config_util.py: a dataset has a size of its own
    (
        "kohya",
        sizes(512, 768),
        {"model.image_size": 512, "data.sources.a.image_size": 512, "data.sources.b.image_size": 768},
    ),
]

SAID: list[tuple[str, dict[str, Any], Kind, str]] = [
    # OneTrainer, modules/module/EMAModule.py; SimpleTuner, helpers/training/ema.py; EveryDream 1, ldm/modules/ema.py
    ("onetrainer", OT | {"ema": "GPU"}, Kind.YOURS, "the ramp of ema.decay"),
    ("simpletuner", TUNER | {"use_ema": True, "ema_warmup_steps": 0}, Kind.YOURS, "the ramp of ema.decay"),
    ("everydream1", ED1 | {"model.params.use_ema": True}, Kind.YOURS, "the ramp of ema.decay"),
    # OneTrainer and SimpleTuner: the whole name
    ("onetrainer", concepts({"text": {"prompt_source": "filename"}}), Kind.YOURS, "captions from file names"),
    ("simpletuner", backend(caption_strategy="filename"), Kind.YOURS, "captions from file names"),
    # OneTrainer, modules/util/config/TrainConfig.py: text towers stop after 30 epochs
    ("onetrainer", TOWERS, Kind.YOURS, "the first text tower's last epoch"),
    (
        "onetrainer",
        TOWERS | {"model_type": "STABLE_DIFFUSION_XL_10_BASE"},
        Kind.YOURS,
        "the second text tower's last epoch",
    ),
    ("onetrainer", concepts({"text": DROPS}), Kind.YOURS, "tags that are dropped"),
    ("onetrainer", concepts({"text": DROPS | {"tag_dropout_mode": "FULL"}}), Kind.MISSING, "text.tag_dropout_mode"),
    (
        "onetrainer",
        concepts({"text": DROPS | {"tag_dropout_mode": "RANDOM WEIGHTED"}}),
        Kind.YOURS,
        "tags that are dropped",
    ),
    # kohya_ss, a percentage of the steps
    ("kohya", OWN | {"epoch": 2, "stop_text_encoder_training": 30}, Kind.YOURS, "stop_text_encoder_training_pct"),
    ("kohya", OWN | {"epoch": 2, "stop_text_encoder_training": 0}, Kind.SAME, "stop_text_encoder_training_pct"),
    # a setting that all sources share, and another dataset has otherwise, whichever says nothing
    ("kohya", subsets({"flip_aug": True}, {"image_dir": "b"}), Kind.MISSING, "b: flip_aug"),
    ("kohya", subsets({}, {"image_dir": "b", "flip_aug": True}), Kind.MISSING, "b: flip_aug"),
    (
        "onetrainer",
        concepts({"image": {"enable_random_flip": False}}, {"path": "b"}),
        Kind.MISSING,
        "b: image.enable_random_flip",
    ),
    ("simpletuner", TUNER | {"backends": [UNCUT, UNCUT | {"id": "b", "crop": True}]}, Kind.MISSING, "b: crop_aspect"),
    # EveryDream 2's sample_prompts.txt is empty
    ("everydream", EDREAM | {"sample_prompts": "sample_prompts.txt"}, Kind.YOURS, "sample_prompts"),
    # OneTrainer, modules/util/create.py: 1 or less is a share of the run
    ("onetrainer", OT | {"learning_rate_warmup_steps": 1.0}, Kind.YOURS, "learning_rate_warmup_steps"),
    ("onetrainer", concepts({}), Kind.YOURS, "include_subdirectories"),
    (
        "kohya",
        OWN | {"lr_scheduler": "cosine", "lr_scheduler_min_lr_ratio": 0.1},
        Kind.SAME,
        "lr_scheduler_min_lr_ratio",
    ),
    ("kohya", OWN | {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 0.2}, Kind.YOURS, "lr_decay_steps"),
    # sd-scripts, library/train_util.py: process_caption draws one of a list; a picture without a file has no caption
    ("kohya", OWN | {"enable_wildcard": True}, Kind.YOURS, "texts in braces"),
    ("kohya", OWN, Kind.YOURS, "pictures without a caption file"),
]
UNSAID: list[tuple[str, dict[str, Any], str]] = [
    ("onetrainer", OT | {"ema": "OFF"}, "the ramp of ema.decay"),
    ("onetrainer", TOWERS | {"epochs": 30}, "the first text tower's last epoch"),
    ("onetrainer", TOWERS, "the second text tower's last epoch"),
    ("onetrainer", concepts({"text": DROPS | {"tag_dropout_mode": "RANDOM"}}), "tags that are dropped"),
    ("kohya", subsets({"class_tokens": "sks dog"}), "pictures without a caption file"),
]


@pytest.mark.parametrize(("system", "given", "expected"), VALUES, ids=[f"{n}-{c[0]}" for n, c in enumerate(VALUES)])
def test_the_recipe_has_what_the_trainer_does(
    system: str, given: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    _, cfg = told(given, folder, system=system)
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected


@pytest.mark.parametrize(("system", "given", "kind", "key"), SAID, ids=[f"{n}-{c[3]}" for n, c in enumerate(SAID)])
def test_the_report_says_what_is_otherwise_here(
    system: str, given: dict[str, Any], kind: Kind, key: str, folder: Path
) -> None:
    (folder / "sample_prompts.txt").write_text("")
    recipe, _ = told(given, folder, system=system)
    assert recipe.fates[key][0] is kind, recipe.report()


@pytest.mark.parametrize(("system", "given", "key"), UNSAID, ids=[f"{n}-{c[2]}" for n, c in enumerate(UNSAID)])
def test_the_report_does_not_say_what_does_not_happen(
    system: str, given: dict[str, Any], key: str, folder: Path
) -> None:
    assert key not in told(given, folder, system=system)[0].fates
