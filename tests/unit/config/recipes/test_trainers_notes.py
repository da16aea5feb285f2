"""What a trainer does with a file, by its own source, and the import does not, is what its report says.

Every case names the file of the trainer's source, at the commit that its table names, which it was read from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cascade_train.config.recipes.recipe import Kind
from tests.unit.config.recipes.test_edges import ADAPTERS, algorithm
from tests.unit.config.recipes.test_taken_over import OT, OWN, folder, told
from tests.unit.config.recipes.trainer_files import (
    DROPS,
    ED1,
    EDREAM,
    TOWERS,
    TUNER,
    UNCUT,
    XL,
    backend,
    concepts,
    subsets,
    without,
)  # fmt: skip

assert callable(folder), "a fixture"
SAID: list[tuple[str, dict[str, Any], Kind, str]] = [
    # OneTrainer: a text tower of SDXL loses its caption alone (modules/model/StableDiffusionXLModel.py:238)
    (
        "onetrainer",
        XL | {"text_encoder_2": {"dropout_probability": 0.1}},
        Kind.MISSING,
        "text_encoder_2.dropout_probability",
    ),
    # sd-scripts, library/train_util.py:2168: regularisation pictures come as often as all others
    ("kohya", subsets({}, {"image_dir": "reg", "is_reg": True}), Kind.YOURS, "is_reg of reg"),
    # OneTrainer, modules/util/lr_scheduler_util.py:48: a smooth cosine
    ("onetrainer", OT | {"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, Kind.MISSING, "learning_rate_scheduler"),
    # SimpleTuner, helpers/training/custom_schedule.py:195: warmup steps are the period of a cosine
    ("simpletuner", TUNER | {"lr_scheduler": "cosine"}, Kind.MISSING, "lr_scheduler"),
    ("simpletuner", TUNER | {"lr_scheduler": "cosine_with_restarts"}, Kind.MISSING, "lr_scheduler"),
    ("simpletuner", TUNER | {"lr_scheduler": "cosine"}, Kind.SAME, "lr_warmup_steps"),
    # SimpleTuner, helpers/training/optimizer_param.py:728, 1190, 250
    ("simpletuner", TUNER | {"optimizer": "prodigy"}, Kind.YOURS, "optimizer=prodigy"),
    ("simpletuner", TUNER | {"adam_weight_decay": 0.3}, Kind.UNNEEDED, "adam_weight_decay"),
    (
        "simpletuner",
        TUNER | {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant"},
        Kind.YOURS,
        "warmup of a schedule-free optimizer",
    ),
    # OneTrainer, modules/util/create.py: adv_optm, prodigyplus
    ("onetrainer", algorithm("PRODIGY_ADV"), Kind.YOURS, "a variant of its optimizer"),
    # SimpleTuner, helpers/models/common.py:5942: a quarter of the steps unless the file says more
    ("simpletuner", TUNER, Kind.YOURS, "offset noise of a part of the steps"),
    ("simpletuner", TUNER | {"noise_offset_probability": 0.5}, Kind.MISSING, "noise_offset_probability"),
    # OneTrainer, modules/modelSetup/mixin/ModelSetupNoiseMixin.py
    ("onetrainer", OT | {"perturbation_noise_weight": 0.1}, Kind.MISSING, "perturbation_noise_weight"),
    ("onetrainer", OT | {"perturbation_noise_weight": 0.0}, Kind.SAME, "perturbation_noise_weight"),
    ("onetrainer", OT | {"timestep_shift": 2.0}, Kind.YOURS, "timestep_shift"),
    ("onetrainer", OT | {"timestep_shift": 1.0}, Kind.SAME, "timestep_shift"),
    # sd-scripts, library/train_util.py:2078: class_tokens caption pictures without a file
    ("kohya", subsets({"class_tokens": "sks dog"}), Kind.YOURS, "class_tokens"),
    # EveryDream 2, train.py:1378, 1009; optimizer/optimizers.py:219
    ("everydream", without(EDREAM, "loss_type"), Kind.YOURS, "loss_type"),
    ("everydream", EDREAM | {"lr_scheduler": "cosine"}, Kind.YOURS, "lr_warmup_steps"),
    ("everydream", EDREAM | {"lr_scheduler": "cosine"}, Kind.YOURS, "lr_decay_steps"),
    ("everydream", EDREAM | {"lr_warmup_steps": 400}, Kind.UNNEEDED, "lr_warmup_steps"),
    # sd-scripts, library/train_util.py:5410: two sides are a shape, where there are no buckets
    ("kohya", OWN | {"resolution": "512,768"}, Kind.YOURS, "a resolution of two sides"),
    ("kohya", subsets({}, resolution=[512, 768]), Kind.YOURS, "a resolution of two sides"),
    ("kohya", ADAPTERS | {"unet_lr": 0.0}, Kind.YOURS, "unet_lr"),
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
    ("kohya", OWN | {"resolution": "512,512"}, "a resolution of two sides"),
    ("kohya", OWN | {"resolution": "512,768", "enable_bucket": True}, "a resolution of two sides"),
    ("kohya", subsets({}, resolution=[512, 512]), "a resolution of two sides"),
    ("simpletuner", TUNER | {"offset_noise": False}, "offset noise of a part of the steps"),
    ("simpletuner", TUNER, "optimizer=prodigy"),
    ("onetrainer", algorithm("PRODIGY"), "a variant of its optimizer"),
    ("everydream", EDREAM | {"lr_scheduler": "cosine", "lr_decay_steps": 900, "lr_warmup_steps": 9}, "lr_decay_steps"),
]
ABSENT: list[tuple[str, dict[str, Any], str]] = [
    ("onetrainer", OT | {"ema": "OFF"}, "the ramp of ema.decay"),
    ("onetrainer", TOWERS | {"epochs": 30}, "the first text tower's last epoch"),
    ("onetrainer", TOWERS, "the second text tower's last epoch"),
    ("onetrainer", concepts({"text": DROPS | {"tag_dropout_mode": "RANDOM"}}), "tags that are dropped"),
    ("kohya", subsets({"class_tokens": "sks dog"}), "pictures without a caption file"),
    # what is typed is sd-scripts', which counts steps
    (
        "kohya",
        OWN | {"epoch": 2, "additional_parameters": "--stop_text_encoder_training=50"},
        "stop_text_encoder_training_pct",
    ),
]


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
    recipe, _ = told(given, folder, system=system)
    assert recipe.fates.get(key, (Kind.SAME,))[0] is not Kind.YOURS


def test_a_key_that_the_one_dataset_has_itself_is_not_called_its_trainers_default(folder: Path) -> None:
    recipe, _ = told(backend(crop=False), folder, system="simpletuner")
    (line,) = [each for each in recipe.report() if "crop: data.aspect_ratios" in each]
    assert line.endswith("wide")


@pytest.mark.parametrize(("system", "given", "key"), ABSENT, ids=[f"{n}-{c[2]}" for n, c in enumerate(ABSENT)])
def test_the_report_has_no_line_on_what_does_not_happen(
    system: str, given: dict[str, Any], key: str, folder: Path
) -> None:
    assert key not in told(given, folder, system=system)[0].fates
