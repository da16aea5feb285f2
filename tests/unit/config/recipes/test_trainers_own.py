"""What a trainer does with a file, by its own source, is what the import composes, or what it says that it leaves.

Every case names the file of the trainer's source, at the commit that its table names, which its values were read from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cascade_train.config.recipes.recipe import Kind
from tests.unit.config.recipes.test_edges import ADAPTERS, algorithm
from tests.unit.config.recipes.test_systems import BACKENDS, ONETRAINER
from tests.unit.config.recipes.test_taken_over import ED, OT, OWN, ST, folder, told

assert callable(folder), "a fixture"
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


VALUES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # OneTrainer, modules/modelSetup/mixin/ModelSetupDiffusionLossMixin.py:293: CONSTANT, the default, does nothing
    (
        "onetrainer",
        ONETRAINER | {"loss_weight_fn": "CONSTANT"},
        {f"{WEIGHT}._target_": f"{WEIGHTS}.ConstantLossWeight", f"{WEIGHT}.v": 1.0},
    ),
    ("onetrainer", without(ONETRAINER, "loss_weight_fn"), {f"{WEIGHT}.v": 1.0}),
    ("onetrainer", without(ONETRAINER, "loss_weight_strength"), {f"{WEIGHT}.gamma": 5.0, f"{WEIGHT}.k": 1.0}),
    ("onetrainer", ONETRAINER | {"loss_weight_fn": "DEBIASED_ESTIMATION"}, DEBIASED),
    ("onetrainer", OT | {"loss_weight_fn": "DEBIASED_ESTIMATION"}, DEBIASED),
    # modules/modelSetup/BaseWuerstchenSetup.py: of Stable Cascade the prediction is that of noise
    (
        "onetrainer",
        ONETRAINER | {"force_v_prediction": True, "loss_weight_fn": "CONSTANT"},
        {"objective.target._target_": "cascade_train.diffusion.target.EpsilonTarget"},
    ),
    # SimpleTuner, helpers/models/common.py:6380: F.mse_loss
    ("simpletuner", CASCADE, {f"{WEIGHT}.v": 1.0}),
    (
        "simpletuner",
        CASCADE | {"loss_type": "huber", "huber_c": 0.2},
        {f"{WEIGHT}.v": 1.0, "objective.distance.delta": 0.2},
    ),
    ("simpletuner", CASCADE | {"loss_type": "l2", "snr_gamma": 3}, {f"{WEIGHT}.gamma": 3}),
    # OneTrainer, modules/util/config/TrainConfig.py:266, 447: the one is caption dropout, the other LoRA's
    (
        "onetrainer",
        OT | {"dropout_probability": 0.2, "text_encoder": {"train": True, "dropout_probability": 0.3}},
        {"task.dropout": 0.2, "task.cond_drop_prob": 0.3},
    ),
    (
        "onetrainer",
        without(OT, "dropout_probability", "text_encoder"),
        {"task.dropout": 0.0, "task.cond_drop_prob": 0.0},
    ),
    # sd-scripts, library/train_util.py:3761, 3767: one cycle, power 1, which other schedules do not read (:5346)
    ("kohya", OWN | {"lr_scheduler": "cosine_with_restarts"}, {f"{LR}.cycles": 1}),
    ("kohya", OWN | {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3}, {f"{LR}.cycles": 3}),
    ("kohya", OWN | {"lr_scheduler": "polynomial"}, {f"{LR}.power": 1.0}),
    ("kohya", OWN | {"lr_scheduler": "cosine", "lr_scheduler_num_cycles": 3}, {f"{LR}.cycles": None}),
    ("kohya", OWN | {"lr_scheduler": "linear", "lr_scheduler_power": 2.0}, {f"{LR}.power": 1.0}),
    # OneTrainer, modules/util/config/TrainConfig.py:1063: one cycle, of restarts alone (modules/util/create.py:1149)
    ("onetrainer", OT | {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS"}, {f"{LR}.cycles": 1}),
    ("onetrainer", OT | {"learning_rate_scheduler": "COSINE", "learning_rate_cycles": 3.0}, {f"{LR}.cycles": None}),
    # EveryDream 2, optimizer/optimizers.py:267: diffusers' get_scheduler, whose power is 1
    ("everydream", EDREAM | {"lr_scheduler": "polynomial"}, {f"{LR}.power": 1.0}),
    # SimpleTuner, field_registry/sections/training.py:787, advanced.py:921
    ("simpletuner", without(TUNER, "lr_end"), {f"{LR}.power": 0.8, f"{LR}.min_factor": pytest.approx(4e-3)}),
    # prodigyopt, lion_pytorch, schedulefree, came_pytorch, torch.optim.SGD: their constructors
    ("kohya", OWN | {"optimizer_type": "Prodigy"}, PRODIGY),
    (
        "kohya",
        OWN | {"optimizer_type": "Prodigy", "optimizer_args": ["use_bias_correction=True"]},
        PRODIGY | {f"{ALGORITHM}.bias_correction": True},
    ),
    ("kohya", OWN | {"optimizer_type": "Lion"}, {DECAY: 0.0}),
    ("kohya", OWN | {"optimizer_type": "Lion", "optimizer_args": ["weight_decay=0.2"]}, {DECAY: 0.2}),
    ("kohya", OWN | {"use_lion_optimizer": True}, {DECAY: 0.0}),
    ("kohya", OWN | {"optimizer_type": "AdamWScheduleFree"}, {DECAY: 0.0}),
    ("kohya", OWN | {"optimizer_type": "SGDNesterov"}, {DECAY: 0.0, f"{ALGORITHM}.momentum": 0.9}),
    ("kohya", OWN | {"optimizer_type": "AdamW8bit"}, {DECAY: 0.01}),
    # OneTrainer, modules/util/optimizer_util.py:86
    ("onetrainer", algorithm("PRODIGY"), PRODIGY),
    ("onetrainer", algorithm("LION"), {DECAY: 0.0, f"{ALGORITHM}.betas": [0.9, 0.99]}),
    ("onetrainer", algorithm("LION_8BIT"), {DECAY: 0.0, f"{ALGORITHM}.betas": [0.9, 0.999]}),
    (
        "onetrainer",
        algorithm("LION_8BIT", beta1=0.8, weight_decay=0.3),
        {DECAY: 0.3, f"{ALGORITHM}.betas": [0.8, 0.999]},
    ),
    ("onetrainer", algorithm("ADAM"), {DECAY: 0.0}),
    ("onetrainer", algorithm("ADAMW"), {DECAY: 0.01}),
    ("onetrainer", algorithm("MUON"), {DECAY: 0.0}),
    ("onetrainer", algorithm("SGD"), {DECAY: 0.0}),
    # SimpleTuner, helpers/training/optimizer_param.py:77 on; :1190: adam_weight_decay is DeepSpeed's
    ("simpletuner", TUNER | {"optimizer": "optimi-lion", "adam_weight_decay": 0.3}, {DECAY: 0.0}),
    ("simpletuner", TUNER | {"optimizer": "adamw_schedulefree+aggressive"}, {DECAY: 0.001, f"{ALGORITHM}.eps": 1e-6}),
    ("simpletuner", TUNER | {"optimizer": "muon"}, {DECAY: 0.1}),
    ("simpletuner", TUNER | {"optimizer": "optimi-adamw"}, {DECAY: 0.0, f"{ALGORITHM}.betas": [0.9, 0.99]}),
    ("simpletuner", TUNER | {"optimizer_config": "weight_decay=0.02"}, {DECAY: 0.02}),
    # EveryDream 2, optimizer/optimizers.py:320: its betas, not Lion's
    (
        "everydream",
        EDREAM | {"optimizer": {"base": {"optimizer": "lion"}}},
        {f"{ALGORITHM}.betas": [0.9, 0.999], DECAY: 0.01},
    ),
    # SimpleTuner, helpers/data_backend/config/image.py:121: uncropped ones keep their shape; else a random square
    ("simpletuner", backend(), {"data.aspect_ratios": "wide"}),
    ("simpletuner", backend(crop=False, crop_aspect="square", crop_style="center"), {"data.aspect_ratios": "wide"}),
    ("simpletuner", backend(crop=True), {"data.aspect_ratios": None, "data.crop": "random"}),
    ("simpletuner", backend(crop=True, crop_style="center"), {"data.crop": "center"}),
    ("simpletuner", TUNER, {"data.aspect_ratios": "wide"}),
    # SimpleTuner, field_registry/sections/advanced.py:840
    ("simpletuner", without(TUNER, "noise_offset"), {"objective.offset_noise": 0.1}),
    ("simpletuner", TUNER | {"offset_noise": False}, {"objective.offset_noise": 0.0}),
    # sd-scripts, library/custom_train_functions.py:458: bilinear, all levels; library/train_util.py:4104: 0.3
    (
        "kohya",
        OWN | {"multires_noise_iterations": 6},
        {
            "objective.noise.interpolation": "bilinear",
            "objective.noise.side_range": None,
            "objective.noise.discount": 0.3,
            "objective.noise.levels": 6,
        },
    ),
    (
        "kohya",
        OWN | {"multires_noise_iterations": 6, "multires_noise_discount": 0.2},
        {"objective.noise.discount": 0.2},
    ),
    # OneTrainer, ModelSetupNoiseMixin.py: perturbed noise is the target, timesteps are shifted
    (
        "onetrainer",
        OT | {"perturbation_noise_weight": 0.1, "timestep_shift": 2.0},
        {"objective.input_perturbation": 0.0, "objective.shift": 1.0},
    ),
    # sd-scripts, library/train_util.py:1968: the first line
    ("kohya", OWN, {"data.captions.choose": "first"}),
    ("kohya", OWN | {"enable_wildcard": True}, {"data.captions.choose": "random"}),
    # OneTrainer, modules/dataLoader/mixin/DataLoaderText2ImageMixin.py:113, and config/ConceptConfig.py:109
    ("onetrainer", OT | {"concepts": [{"path": "a"}]}, {"data.captions.choose": "random", "data.caption_from": "file"}),
    # sd-scripts, train_db.py:172: it alone reads files without captions' metadata
    ("kohya", OWN, {"model.text_encoder.train": True, "model.text_encoder.stop_after": None}),
    ("kohya", OWN | {"in_json": "a.json"}, {"model.text_encoder.train": False}),
    ("kohya", subsets({"metadata_file": "a.json"}), {"model.text_encoder.train": False}),
    ("kohya", subsets({}), {"model.text_encoder.train": True}),
    ("kohya", OWN | {"pretrained_model_name_or_path": "sd_xl.safetensors"}, {"model.text_encoder.train": False}),
    # EveryDream 2, optimizer/optimizers.py:157: schedules step with every batch; diffusers' constant one has no warmup
    (
        "everydream",
        EDREAM | {"lr_scheduler": "cosine", "lr_warmup_steps": 400, "grad_accum": 4},
        {f"{LR}.warmup_steps": 100},
    ),
    ("everydream", EDREAM | {"lr_scheduler": "constant", "lr_warmup_steps": 400}, {f"{LR}.warmup_steps": 1}),
    (
        "everydream",
        without(EDREAM, "lr_scheduler") | {"optimizer": {"base": {"lr_warmup_steps": 400}}},
        {f"{LR}.warmup_steps": 1},
    ),
    # SimpleTuner, helpers/training/custom_schedule.py:546; field_registry/sections/training.py:147
    ("simpletuner", TUNER | {"lr_scheduler": "constant"}, {f"{LR}.warmup_steps": 1}),
    ("simpletuner", without(TUNER, "lr_scheduler"), {f"{LR}.warmup_steps": 100}),
    # sd-scripts, networks/lora.py:71: an alpha of 0 is the rank
    ("kohya", ADAPTERS | {"network_dim": 8, "network_alpha": 0}, {"task.alpha": 8}),
    ("kohya", ADAPTERS | {"network_alpha": 0}, {"task.alpha": 4, "task.rank": 4}),
    # sd-scripts, networks/lora.py:1188: without a rate the network does not train
    ("kohya", ADAPTERS | {"unet_lr": 0.0, "learning_rate": 1e-4}, {"optimizer.lr": 1e-4}),
    # EveryDream 2, train.py:949
    ("everydream", EDREAM | {"zero_frequency_noise_ratio": -1}, {"objective.offset_noise": 0.0}),
]

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


@pytest.mark.parametrize(("ranks", "warmup"), [(1, 400), (4, 100), (1000, 1)])
def test_sd_scripts_warmup_counts_a_step_of_each_rank(ranks: int, warmup: int, folder: Path) -> None:
    """Accelerate's scheduler steps once for each process; library/train_util.py:5274 multiplies the length alone."""
    given = OWN | {"lr_scheduler": "cosine", "lr_warmup_steps": 400}
    assert told(given, folder, system="kohya", ranks=ranks)[1].lr_scheduler.warmup_steps == warmup


def test_what_train_db_does_by_itself_is_left_out_with_our_behaviour(folder: Path) -> None:
    assert told(OWN, folder, system="kohya", behaviour="ours")[1].model.text_encoder.train is False
