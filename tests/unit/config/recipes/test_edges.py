"""Values at the edge of what a trainer's key takes: what the report says, and what the recipe has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from cascade_train.__main__ import launch
from cascade_train.config.recipes.reading import read_source, resolved
from tests.unit.commands.test_recipe import official
from tests.unit.config.recipes.test_systems import BACKENDS, MINDONE, ONETRAINER
from tests.unit.config.recipes.test_taken_over import ED, OT, OWN, ST, folder, told
from tests.unit.config.seeds import SEEDS

assert callable(folder), "a fixture"
ADAPTERS = OWN | {"network_module": "networks.lora"}
BACKEND: Any = BACKENDS[0]
EDREAM = ED | {"resume_ckpt": "sd_v1-5"}
TUNER = ST | {"model_family": "sdxl"}
OPEN = resolved(SEEDS["open_diffusion/template"]["file"])
WIDE = {"unet": {"params": {"cross_attention_dim": 1024}}}
MIND = yaml.safe_load(MINDONE)
EPS, BETAS = "optimizer.algorithm.eps", "optimizer.algorithm.betas"
VELOCITY = {"noise_scheduler_training": {"params": {"prediction_type": "v_prediction"}}}
TARGET = "cascade_train.diffusion.target.VTarget"
TIMES = "cascade_train.diffusion.times"
HUBER = "cascade_train.diffusion.distance.Huber"
ADAFACTOR = "cascade_train.engine.algorithms.adafactor.Adafactor"


def algorithm(name: str, **more: Any) -> dict[str, Any]:
    return OT | {"optimizer": {"optimizer": name, **more}}


CASES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("onetrainer", algorithm("ADAFACTOR", scale_parameter=False, eps=1e-30), "it is Adafactor's, and optimizer=adamw",
     {"optimizer.algorithm._target_": "torch.optim.AdamW", EPS: 1e-8}),
    ("onetrainer", algorithm("ADAFACTOR", scale_parameter=True, eps=1e-30), "torch's Adafactor adds it elsewhere",
     {"optimizer.algorithm._target_": ADAFACTOR}),
    ("kohya", OWN | {"optimizer_type": "adafactor", "optimizer_args": ["relative_step=False", "eps=(1e-30,1e-3)"]},
     "torch's Adafactor adds it elsewhere", {"optimizer.algorithm._target_": ADAFACTOR}),
    ("open_diffusion", OPEN | {"model": OPEN["model"] | WIDE | VELOCITY}, "objective=ddpm_v",
     {"objective.target._target_": TARGET}),
    ("kohya", ADAPTERS | {"train_data_dir": "a" * 5000}, "folders of train_data_dir: those named as 10_cats are not",
     {"data.path": "a" * 5000}),
    ("onetrainer", OT | {"resolution": "512,768,1024"}, "resolution: 512,768,1024 are several sizes that train side",
     {}),
    ("onetrainer", OT | {"resolution": "512x768"}, "resolution: model.image_size=640", {"model.image_size": 640}),
    ("onetrainer", OT | {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": -0.5, "noising_weight": 0.2},
     "timestep_distribution: times@objective.times=logit_normal",
     {"objective.times": {"_target_": f"{TIMES}.LogitNormalTimes", "mean": -0.5, "std": 1.2}}),
    ("onetrainer", OT | {"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.3},
     "timestep_distribution: add times=mode", {"objective.times": None}),
    ("onetrainer", OT | {"timestep_distribution": "SIGMOID"}, "timestep_distribution: times= is logit_normal", {}),
    ("onetrainer", OT | {"model_type": "FLUX_DEV_1", "base_model_name": "b/flux"},
     "model: model_type=FLUX_DEV_1 is none of the families here | those of another model", {}),
    ("simpletuner", TUNER | {"model_family": "flux", "pretrained_model_name_or_path": "b/flux"},
     "model: model_family=flux, model_flavour=stage-c-lite is none of the families here | those of another model", {}),
    ("kohya", ADAPTERS | {"flux1_checkbox": True}, "model: flux1_checkbox=True is none of the families here",
     {}),
    ("mindone", MIND | {"seed": "???"}, "seed: its value is none of the file's", {"run.seed": 0}),
    ("official", official("finetune_c_3b", webdataset_path="???"), "webdataset_path: its value is none of", {}),
    ("onetrainer", algorithm("PRODIGY", d_coef=0.5, d0=1e-5, use_bias_correction=True, safeguard_warmup=True),
     "optimizer.d_coef: optimizer.algorithm.d_coef=0.5",
     {"optimizer.algorithm.d0": 1e-5, "optimizer.algorithm.bias_correction": True,
      "optimizer.algorithm.safeguard_warmup": True}),
    ("onetrainer", algorithm("SGD", momentum=0.8, nesterov=True), "optimizer.momentum: optimizer.algorithm.momentum",
     {"optimizer.algorithm.momentum": 0.8, "optimizer.algorithm.nesterov": True}),
    ("onetrainer", algorithm("CAME", beta3=0.99), "optimizer.beta3", {BETAS: [0.9, 0.999, 0.99]}),
    ("onetrainer", algorithm("ADAMW", percentile_clipping=5, amsgrad=False),
     "optimizer.percentile_clipping: optimizer.algorithm has the arguments of ours", {}),
    ("onetrainer", algorithm("ADAMW", amsgrad=False), "optimizer.amsgrad, ", {"optimizer.decay": "all"}),
    ("kohya", OWN | {"optimizer_type": "SGDNesterov", "optimizer_args": ["nesterov=False"]},
     "optimizer_args.nesterov", {"optimizer.algorithm.nesterov": False}),
    ("kohya", OWN | {"optimizer_type": "CAME", "optimizer_args": ["eps=(1e-30,1e-16)"]}, "optimizer_args.eps", {}),
    ("kohya", OWN | {"prior_loss_weight": 1.0, "min_timestep": 0.0, "max_timestep": 1000.0, "reg_data_dir": "reg"},
     "prior_loss_weight: 1.0 is what happens here", {}),
    ("kohya", OWN | {"prior_loss_weight": 0.5, "reg_data_dir": "reg"},
     "prior_loss_weight: it weighs pictures of regularisation, of which no source is made", {}),
    ("everydream", EDREAM | {"timestep_start": 0.0, "pyramid_noise_discount": 0.0, "min_snr_gamma": 0.0},
     "min_snr_gamma, pyramid_noise_discount, timestep_start: 0.0 is what happens here",
     {"objective.noise._target_": "cascade_train.diffusion.noise.PlainNoise"}),
    ("everydream", ED | {"resume_ckpt": "findlast"}, "resume_ckpt: its newest checkpoint: model.weights=<file>", {}),
    ("simpletuner", TUNER | {"snr_gamma": 0.0}, "snr_gamma: 0.0 is what happens here", {}),
    ("mindone", MIND | {"snr_gamma": 0}, "snr_gamma: 0 is what happens here", {}),
    ("kohya", OWN | {"min_snr_gamma": 0.0}, "min_snr_gamma: 0.0 is what happens here", {}),
    ("kohya", OWN | {"debiased_estimation_loss": True}, "debiased_estimation_loss: objective=ddpm_debiased",
     {"objective.loss_weight._target_": "cascade_train.diffusion.loss_weight.DebiasedLossWeight"}),
    ("kohya", OWN | {"debiased_estimation_loss": True, "v_parameterization": True},
     "debiased_estimation_loss: no objective has this weight where the network predicts the velocity",
     {"objective.target._target_": TARGET, "objective.loss_weight.v": 1.0}),
    ("kohya", OWN | {"debiased_estimation_loss": True, "min_snr_gamma": 5.0},
     "debiased_estimation_loss: of two weights that of min_snr_gamma alone is taken",
     {"objective.loss_weight._target_": "cascade_train.diffusion.loss_weight.MinSNRGammaLossWeight"}),
    ("kohya", OWN | {"loss_type": "huber", "huber_c": 0.3, "huber_schedule": "constant", "huber_scale": 2.0},
     "huber_scale: multiply objective.distance.delta by it",
     {"objective.distance": {"_target_": HUBER, "delta": 0.3, "schedule": "constant"}}),
    ("kohya", OWN | {"loss_type": "huber", "huber_schedule": "exponential"},
     "huber_schedule: objective.distance.schedule=snr is taken, which falls with the noise, not with the timestep",
     {"objective.distance": {"_target_": HUBER, "delta": 0.1, "schedule": "snr"}}),
    ("simpletuner", TUNER | {"loss_type": "l2", "huber_c": 0.3}, "huber_c: it belongs to loss_type",
     {"objective.distance": None}),
    ("simpletuner", TUNER | {"resolution": 1.0, "resolution_type": "area"}, "resolution: an area in millions of", {}),
    ("simpletuner", TUNER | {"backends": [BACKEND | {"resolution": 0.25, "resolution_type": "area"}]},
     "resolution: an area in millions of pixels", {}),
    ("simpletuner", TUNER | {"resolution": 768.0}, "resolution: model.image_size=768", {"model.image_size": 768}),
    ("simpletuner", TUNER | {"backends": [BACKEND | {"minimum_image_size": 0.5}]},
     "minimum_image_size: an area in millions of pixels", {"data.size_filters": None}),
    ("onetrainer", OT | {"gradient_checkpointing": "CPU_OFFLOADED"}, "gradient_checkpointing: activation_che",
     {"activation_checkpointing": True}),
    ("onetrainer", ONETRAINER | {"prior": {"gradient_checkpointing": "OFF"}}, "prior.gradient_checkpointing",
     {"activation_checkpointing": False}),
    ("onetrainer", OT | {"unet": {"gradient_checkpointing": True}}, "unet.gradient_checkpointing",
     {"activation_checkpointing": True}),
    ("kohya", OWN | {"seed": -1}, "seed: random there", {"run.seed": 0}),
    ("mindone", MIND | {"seed": -1}, "seed: random there", {"run.seed": 0}),
    ("kohya", OWN | {"datasets": [{"batch_size": size, "subsets": [{"image_dir": f"a{size}"}]} for size in (4, 2)]},
     "batch_size of datasets: 4, 2 of its datasets, and one here: train.micro_batch_size=2",
     {"train.micro_batch_size": 2}),
    ("official", official("finetune_c_3b", dataset_filters=[["a", "lambda s: __import__('os')"]]),
     "calls are not allowed", {"data.row_filters": None}),
    ("official", official("finetune_c_3b", dataset_filters=[["a", 3]]), "dataset_filters: ",
     {"data.row_filters": None}),
    ("everydream", EDREAM | {"lr": 3.3e-6, "seed": 7}, "",
     {"optimizer.lr": 3.3e-6, "optimizer.decay": "all", "data.crop": "random", "train.max_grad_norm": None,
      "run.seed": 7}),
    ("everydream1", SEEDS["everydream/standard"]["file"], "", {"run.seed": 23, "data.crop": "random"}),
    ("mindone", SEEDS["mindone/guide"]["file"], "", {"data.crop": "random", "run.seed": 42}),
    ("open_diffusion", OPEN, "",
     {"ema.decay": None, "task.cond_drop_prob": 0.0, "train.max_grad_norm": None, "optimizer.decay": "all"}),
    ("kohya", OWN | {"vae": "my_vae.safetensors", "xformers": True, "sample_every_n_steps": 0, "seed": ""}, "",
     {"model.vae.weights": "my_vae.safetensors", "attention": "sdpa", "sample.every_steps": None, "run.seed": 0}),
    ("onetrainer", OT, "", {"task.module_filters": ["attentions"]}),
    ("simpletuner", ST | {"use_ema": False}, "", {"ema.decay": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "given", "said", "expected"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)]
)
def test_the_report_says_what_the_recipe_has(
    system: str, given: Any, said: str, expected: dict[str, Any], folder: Path
) -> None:
    recipe, cfg = told(given, folder, "task=lora", "model=sd15", system=system)
    report = "\n".join(recipe.report())
    assert all(part in report for part in said.split(" | ")), report
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["../outside", "inside/link", "absolute"])
def test_no_folder_is_listed_that_is_not_beside_the_file(name: str, folder: Path) -> None:
    for place in ("outside/10_secret", "mine/inside/3_cats", "mine/inside/1_dogs"):
        (folder / place).mkdir(parents=True)
    (folder / "outside/secret.csv").touch()
    (folder / "mine/inside/link").symlink_to(folder / "outside")
    names = {"absolute": str(folder / "outside")}
    given = names.get(name, f"mine/{name}")
    for system, source in (("kohya", ADAPTERS | {"train_data_dir": given}), ("mindone", MIND | {"data_path": given})):
        recipe, cfg = told(source, folder, system=system, source=str(folder / "mine/given.json"))
        assert "secret" not in "\n".join([*recipe.report(), OmegaConf.to_yaml(cfg)])
        assert "not listed, as they are not beside the file" in "\n".join(recipe.report())
        assert str(cfg.data.path).startswith(given)
    source = ADAPTERS | {"train_data_dir": "mine/inside"}
    _, cfg = told(source, folder, system="kohya", source=str(folder / "mine/given.json"))
    assert cfg.data.repeats == {"cats": 3}


def test_files_and_flags_of_a_shells_lines_are_followed_by_their_former_names(folder: Path) -> None:
    (folder / "config").mkdir()
    (folder / "config/backends.json").write_text(json.dumps(BACKENDS))
    lines = "MODEL_FAMILY=sdxl\nMODEL_TYPE=full\nDATALOADER_CONFIG=config/backends.json\n"
    lines += 'TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --lr_warmup_steps=7 --num_eval_images 3"\n'
    source = folder / "config/config.env"
    source.write_text(lines)
    recipe, cfg = told(read_source(source), folder, source=str(source))
    assert (cfg.data.path, cfg.lr_scheduler.warmup_steps) == ("/data/cats", 7)
    report = "\n".join(recipe.report())
    assert "data_backend_config: its keys are those of config/backends.json" in report
    assert "Not known" not in report


@pytest.mark.parametrize("key", ["learning_rate", "max_grad_norm"])
def test_a_number_that_is_none_is_refused_by_its_key(
    key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "given.json").write_text(json.dumps(OWN | {key: float("nan")}))
    assert launch(["recipe", "import", "given.json", "out=experiment/x.yaml"]) == 2
    assert key in capsys.readouterr().err
