"""What a trainer does with a file, by its own source, is what the import composes.

Every case names the file of the trainer's source, at the commit that its table names, which its values were read from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.config.recipes.test_edges import ADAPTERS, algorithm
from tests.unit.config.recipes.test_systems import ONETRAINER
from tests.unit.config.recipes.test_taken_over import OT, OWN, folder, told
from tests.unit.config.recipes.trainer_files import (
    ALGORITHM,
    CASCADE,
    CONSTANT,
    DEBIASED,
    DECAY,
    DROPS,
    EDREAM,
    LR,
    PRODIGY,
    TAGS,
    TUNER,
    WEIGHT,
    WEIGHTS,
    backend,
    concepts,
    sizes,
    subsets,
    without,
)  # fmt: skip

assert callable(folder), "a fixture"
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


@pytest.mark.parametrize(("system", "given", "expected"), VALUES, ids=[f"{n}-{c[0]}" for n, c in enumerate(VALUES)])
def test_the_recipe_has_what_the_trainer_does(
    system: str, given: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    _, cfg = told(given, folder, system=system)
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected


@pytest.mark.parametrize(("ranks", "warmup"), [(1, 400), (4, 100), (1000, 1)])
def test_sd_scripts_warmup_counts_a_step_of_each_rank(ranks: int, warmup: int, folder: Path) -> None:
    """Accelerate's scheduler steps once for each process; library/train_util.py:5274 multiplies the length alone."""
    given = OWN | {"lr_scheduler": "cosine", "lr_warmup_steps": 400}
    assert told(given, folder, system="kohya", ranks=ranks)[1].lr_scheduler.warmup_steps == warmup


def test_what_train_db_does_by_itself_is_left_out_with_our_behaviour(folder: Path) -> None:
    assert told(OWN, folder, system="kohya", behaviour="ours")[1].model.text_encoder.train is False
