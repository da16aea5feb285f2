"""Configurations of five other trainers become experiments, and each of their keys is accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.__main__ import launch
from cascade_train.config.recipes.reading import read_flags
from cascade_train.config.recipes.table import SYSTEMS, load_table, side, without_switches
from tests.unit.config.composing import checked

pytestmark = pytest.mark.usefixtures("every_extra_installed")

KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "runwayml/stable-diffusion-v1-5"
[additional_network_arguments]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
network_args = ["conv_dim=4"]
unet_lr = 2e-4
text_encoder_lr = 5e-5
network_train_unet_only = false
[optimizer_arguments]
learning_rate = 1e-4
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = 3
lr_warmup_steps = 100
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99", "d0=1"]
max_grad_norm = 0.0
[training_arguments]
output_dir = "out"
output_name = "my_cat"
max_train_epochs = 10
gradient_accumulation_steps = 2
noise_offset = 0.05
min_snr_gamma = 3.0
mixed_precision = "fp16"
gradient_checkpointing = true
max_token_length = 225
cache_latents = true
save_every_n_epochs = 1
prior_loss_weight = 0.5
dataset_config = "data.toml"
ip_noise_gamma = 0.1
brand_new_option = "secret"
sample_prompts = "prompts.txt"
"""

SUBSETS = """
[general]
enable_bucket = true
shuffle_caption = true
keep_tokens = 1
caption_extension = ".txt"
[[datasets]]
resolution = [512, 512]
batch_size = 2
bucket_reso_steps = 64
[[datasets.subsets]]
image_dir = 'data\\10_my cat'
num_repeats = 10
class_tokens = "my cat"
flip_aug = true
caption_prefix = "photo {1},"
[[datasets.subsets]]
image_dir = "data/reg"
is_reg = true
num_repeats = 1
"""

EVERYDREAM = {
    "attn_type": "sdp", "batch_size": 8, "ckpt_every_n_minutes": None, "clip_grad_norm": None, "clip_skip": 0,
    "cond_dropout": 0.06, "data_root": "samples", "disable_textenc_training": False, "flip_p": 0.5, "gpuid": 0,
    "gradient_checkpointing": True, "grad_accum": 2, "log_step": 20, "loss_type": "mse", "max_epochs": 40,
    "optimizer_config": "optimizer.json", "project_name": "cats", "resolution": 768,
    "resume_ckpt": "panopstor/EveryDream", "run_name": None, "sample_steps": 300,
    "save_every_n_epochs": 20, "seed": -1, "shuffle_tags": True, "keep_tags": 2,
    "validation_config": "validation.json", "wandb": False, "zero_frequency_noise_ratio": 0.02, "min_snr_gamma": 5.0,
    "pyramid_noise_discount": 0.03, "ema_decay_rate": 0.999, "ema_update_interval": 50, "ema_device": "cpu",
    "enable_zero_terminal_snr": True, "timestep_start": 0, "timestep_end": 1000, "write_schedule": False,
}  # fmt: skip
OPTIMIZER = {
    "doc": {"lr": "learning rate"},
    "base": {"optimizer": "lion", "lr": 2e-6, "lr_scheduler": "cosine", "lr_decay_steps": None, "lr_warmup_steps": 50,
             "betas": [0.9, 0.99], "epsilon": None, "weight_decay": 0.02},
    "text_encoder_overrides": {"lr": 5e-7},
    "apply_grad_scaler_step_tweaks": True,
}  # fmt: skip
VALIDATION = {"validate_training": True, "val_split_mode": "automatic", "auto_split_proportion": 0.15, "seed": 555}

MINDONE = """
version: SDXL-base-1.0
model:
  target: gm.models.diffusion.DiffusionEngine
  params:
    disable_first_stage_amp: true
    network_config:
      target: gm.modules.diffusionmodules.openaimodel.UNetModel_lora
      params: {lora_dim: 8, lora_alpha: 4, use_recompute: true, transformer_depth: [1, 2, 10]}
    loss_fn_config: {params: {offset_noise_level: 0.05}}
optim:
  base_learning_rate: 1.0e-6
  optimizer_config:
    target: mindspore.nn.AdamWeightDecay
    params: {beta1: 0.9, beta2: 0.98, weight_decay: 0.02}
  scheduler_config: {target: gm.lr_scheduler.LambdaWarmUpScheduler, params: {warm_up_steps: 500}}
data:
  per_batch_size: 1
  total_step: 100000
  num_parallel_workers: 2
  shuffle: true
  dataset_config:
    target: gm.data.dataset.Text2ImageDataset
    params: {target_size: 1024, transforms: [{target: gm.data.mappers.Resize}], odd: 1}
"""
MINDONE_FLAGS = (
    "--per_batch_size 4 --gradient_accumulation_steps=2 --use_ema --scale_lr False --snr_gamma 5.0 --data_path coco"
    " --timestep_bias_strategy range --timestep_bias_begin 200 --timestep_bias_end 500 --timestep_bias_multiplier 2"
    " --lpw True --save_ckpt_interval 500 --data_sink True --clip_grad True --max_grad_norm 0.5"
)

ONETRAINER: dict[str, Any] = {
    "__version": 9, "training_method": "LORA", "model_type": "STABLE_CASCADE_1", "workspace_dir": "work/run",
    "base_model_name": "stabilityai/stable-cascade-prior", "effnet_encoder": {"weight_dtype": "FLOAT_16"},
    "learning_rate_scheduler": "COSINE", "learning_rate": 3e-4, "learning_rate_warmup_steps": 200, "epochs": 20,
    "batch_size": 4, "gradient_accumulation_steps": 2, "ema": "CPU", "ema_decay": 0.99, "ema_update_step_interval": 5,
    "resolution": "1024", "aspect_ratio_bucketing": True, "loss_weight_fn": "P2", "loss_weight_strength": 1.0,
    "dropout_probability": 0.1, "offset_noise_weight": 0.0, "lora_rank": 8, "lora_alpha": 4.0, "lora_decompose": True,
    "prior": {"train": True, "weight_dtype": "BFLOAT_16"},
    "text_encoder": {"train": True, "learning_rate": 1e-5, "dropout_probability": 0.2},
    "optimizer": {"optimizer": "ADAMW", "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.05, "fused": True},
    "optimizer_defaults": {"ADAMW": {"optimizer": "ADAMW"}}, "huber_strength": 0.3, "secrets": {"token": "hf_secret"},
    "sample_after": 200, "sample_after_unit": "STEP", "backup_after": 30, "backup_after_unit": "MINUTE",
    "save_every": 0, "save_every_unit": "NEVER", "samples": [{"enabled": True, "prompt": "a cat"}, {"prompt": ""}],
    "concepts": [
        {"name": "My cats", "path": "/data/cats", "balancing": 2.0, "loss_weight": 1.0,
         "include_subdirectories": True,
         "image": {"enable_random_flip": True, "enable_random_hue": False},
         "text": {"prompt_source": "filename", "enable_tag_shuffling": True, "tag_delimiter": ",",
                  "keep_tags_count": 1}},
        {"name": "others", "path": "/data/others", "balancing": 1.0, "loss_weight": 0.5, "enabled": True,
         "image": {"enable_random_flip": True}, "text": {"prompt_source": "sample", "enable_tag_shuffling": False}},
        {"name": "off", "path": "/data/off", "enabled": False},
    ],
}  # fmt: skip

SIMPLETUNER = {
    "--model_type": "lora", "--model_family": "stable_cascade", "--model_flavour": "stage-c-lite", "--lora_rank": 16,
    "--data_backend_config": "backends.json", "--gradient_accumulation_steps": 2, "--learning_rate": "1e-4",
    "--lr_scheduler": "polynomial", "--lr_end": "1e-6", "--lr_warmup_steps": 100, "--max_train_steps": 30000,
    "--num_train_epochs": 0, "--mixed_precision": "no", "--optimizer": "adamw_bf16", "--output_dir": "output/cats",
    "--report_to": "tensorboard", "--seed": 42, "--train_batch_size": "4", "--use_ema": "true", "--use_dora": False,
    "--base_model_precision": "int8-torchao", "--validation_prompt": "a shiba inu",
    "--validation_guidance": 3.5,
    "--validation_negative_prompt": "ugly", "--validation_num_inference_steps": 30, "--hub_model_id": "cats",
    "--stable_cascade_use_decoder_for_validation": True, "--offset_noise": "true", "--noise_offset": 0.05,
    "--caption_dropout_probability": 0.2, "--max_grad_norm": 1.5, "--grad_clip_method": "norm", "--snr_gamma": 5,
}  # fmt: skip
BACKENDS = [
    {"id": "primary", "type": "local", "dataset_type": "images", "instance_data_dir": "/data/cats", "resolution": 768,
     "crop": True, "crop_style": "random", "crop_aspect": "preserve", "minimum_image_size": 256, "repeats": 0,
     "caption_strategy": "textfile", "resolution_type": "pixel_area", "cache_dir_vae": "/cache",
     "caption_shuffle": {"enable": True, "split_on": "comma", "position_start": 1, "count": 3}},
    {"id": "text", "type": "aws", "dataset_type": "text_embeds", "aws_secret_access_key": "aws-secret"},
]  # fmt: skip


def imported(
    folder: Path, files: dict[str, Any], *arguments: str, ranks: int = 1, more: tuple[str, ...] = ()
) -> DictConfig:
    """Write files, import the first as an experiment, and return its checked configuration."""
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    out = folder / "conf/experiment/mine.yaml"
    code = launch(["recipe", "import", str(folder / next(iter(files))), f"out={out}", "overwrite=true", *arguments])
    assert code == 0
    return checked("experiment=mine", *more, extra=folder / "conf", ranks=ranks)


def check(cfg: DictConfig, expected: dict[str, Any]) -> None:
    """Compare values of a configuration by their dotted keys."""
    assert {key: OmegaConf.select(cfg, key, throw_on_missing=True) for key in expected} == expected


def test_sd_scripts_training_and_dataset_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = "# comment\na cat --w 512 --n bad\n\na dog on a hill\n"
    files = {"train.toml": KOHYA, "data.toml": SUBSETS, "prompts.txt": prompts}
    cfg = imported(tmp_path, files, "model=c_1b", ranks=1)
    check(cfg, {
        "task.rank": 32, "task.alpha": 16, "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.1,
        "optimizer.algorithm.betas": [0.9, 0.99], "train.micro_batch_size": 2, "train.global_batch_size": 4,
        "train.max_epochs": 10, "train.max_grad_norm": None, "lr_scheduler.cycles": 3,
        "lr_scheduler.warmup_steps": 100, "objective.offset_noise": 0.05, "run.dir": "out/my_cat",
        "objective.loss_weight.gamma": 3.0, "sample.prompts": ["a cat", "a dog on a hill"],
        "model.text_encoder.long_captions": True, "task.cond_drop_prob": 0.0, "data.repeats": {"my_cat": 10},
        "data.loss_weights": {"reg": 0.5}, "data.flip_prob": 0.5,
    })  # fmt: skip
    cat = cfg.data.sources.my_cat
    assert (cat.path, cat.captions.tags.keep_first, cat.captions.template) == (
        "data\\10_my cat", 1, "photo {{1}}, {caption}")  # fmt: skip
    assert cfg.data.sources.reg.captions.template is None
    assert (cfg.model.image_size, cfg.data.aspect_ratios, cfg.data.buckets.multiple_px) == (512, "wide", 64)
    said = capsys.readouterr().out
    assert "brand_new_option: it is not in the table of sd-scripts" in said
    assert "secret" not in said
    assert "The file trains model=sd15; model=c_1b trains here." in said
    assert "ip_noise_gamma: objective.input_perturbation=0.1" in said
    assert "network_train_unet_only, text_encoder_lr: text towers of Stable Diffusion train here" in said
    assert "optimizer_args.d0: " in said
    every = {line.partition(" = ")[0].strip() for line in KOHYA.splitlines() if " = " in line}
    assert all(key in said for key in every - {"prompts"}), "each key is accounted for"


def test_what_sd_scripts_does_by_itself_is_taken_or_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"train_data_dir": str(tmp_path / "data"), "resolution": "512,768", "network_dim": 8}
    small = {"train.json": given | {"network_module": "networks.lora"}}
    for name in ("3_cats", "1_dogs"):
        (tmp_path / "data" / name).mkdir(parents=True)
    cfg = imported(tmp_path, small, "model=c_1b", "flags=--train_batch_size 6 --flip_aug")
    check(cfg, {
        "train.max_steps": 1600, "task.alpha": 1, "task.cond_drop_prob": 0.0, "optimizer.lr": 2e-6,
        "train.global_batch_size": 6, "data.repeats": {"cats": 3}, "model.image_size": 640,
        "data.flip_prob": 0.5,
    })  # fmt: skip
    assert "train.max_steps=1600; its default" in capsys.readouterr().out
    ours = imported(tmp_path, small, "model=c_1b", "behaviour=ours")
    check(ours, {"train.max_steps": 10000, "task.alpha": 4.0, "task.cond_drop_prob": 0.05})


def test_everydream_with_the_files_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"train.json": EVERYDREAM, "optimizer.json": OPTIMIZER, "validation.json": VALIDATION}
    cfg = imported(tmp_path, files, "model=c_1b")
    check(cfg, {
        "train.micro_batch_size": 8, "train.global_batch_size": 16, "train.max_epochs": 40,
        "train.max_grad_norm": None, "optimizer.lr": 2e-6, "optimizer.weight_decay": 0.02,
        "optimizer.algorithm.betas": [0.9, 0.99], "lr_scheduler.warmup_steps": 25,
        "objective.offset_noise": 0.02, "objective.noise.discount": 0.03, "objective.loss_weight.gamma": 5.0,
        "sample.every_steps": 150, "log.every_steps": 10, "validate.share": 0.15,
        "task.cond_drop_prob": 0.06, "ema.decay": 0.999, "ema.every_steps": 50, "data.path": "samples",
        "data.captions.tags.keep_first": 2,
    })  # fmt: skip
    assert (cfg.data.aspect_ratios, cfg.data.flip_prob, cfg.model.image_size) == ("wide", 0.5, 768)
    assert cfg.lr_scheduler._target_.endswith("CosineDecaySchedule")
    said = capsys.readouterr().out
    assert "enable_zero_terminal_snr: the schedule is the objective's" in said
    assert "disable_textenc_training: text towers of" in said.replace("optimizer.text_encoder_overrides.lr, ", "")
    assert (cfg.checkpoint.every_epochs, cfg.checkpoint.every_steps) == (EVERYDREAM["save_every_n_epochs"], None)


def test_a_file_that_is_named_and_not_there_is_left_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(tmp_path, {"train.json": EVERYDREAM}, "model=c_1b").optimizer.lr == 1e-6
    why = "optimizer_config: optimizer.json is left: optimizer.json is not in the folder of the file"
    assert why in capsys.readouterr().out


def test_mindones_yaml_with_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = imported(tmp_path, {"lora.yaml": MINDONE}, "model=c_1b", "ranks=2", f"flags={MINDONE_FLAGS}", ranks=2)
    check(cfg, {
        "train.micro_batch_size": 4, "train.global_batch_size": 16, "train.max_steps": 50000,
        "checkpoint.every_steps": 250, "task.rank": 8, "task.alpha": 4, "optimizer.lr": 1e-6,
        "optimizer.algorithm.betas": [0.9, 0.98], "ema.decay": 0.9999,
    })  # fmt: skip
    bias = cfg.objective.timestep_bias
    assert (bias.strategy, bias.begin, bias.end, bias.multiplier) == ("range", 0.2, 0.5, 2)
    assert (cfg.data.path, cfg.data.image_column, cfg.data.caption_column) == ("coco/img_txt.csv", "dir", "text")
    assert (cfg.model.image_size, cfg.train.max_grad_norm, cfg.task.cond_drop_prob) == (1024, 0.5, 0.0)
    said = capsys.readouterr().out
    assert "data.dataset_config.params.odd: an argument of its own dataset" in said
    assert "data_sink" in said.partition("Not needed here")[2]


def test_onetrainers_training_of_stage_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = imported(tmp_path, {"config.json": ONETRAINER})
    assert cfg.model.network.block_out_channels == [2048, 2048]
    check(cfg, {
        "task.rank": 8, "task.alpha": 4.0, "task.dora": True, "task.dropout": 0.1, "task.cond_drop_prob": 0.2,
        "optimizer.algorithm.betas": [0.9, 0.98], "train.global_batch_size": 8, "train.max_epochs": 20,
        "lr_scheduler.warmup_steps": 100, "run.dir": "work/run", "ema.decay": 0.99, "ema.every_steps": 5,
        "sample.every_steps": 100, "sample.prompts": ["a cat"],
    })  # fmt: skip
    assert cfg.ema.device == "cpu"
    assert set(cfg.data.sources) == {"my_cats", "others"}
    check(cfg, {"data.repeats": {"my_cats": 2.0}, "data.loss_weights": {"others": 0.5}, "data.flip_prob": 0.5})
    assert (cfg.data.sources.my_cats.caption_from, cfg.data.sources.others.caption_from) == ("name", "file")
    said = capsys.readouterr().out
    assert "hf_secret" not in said
    assert "base_model_name: they are the model's own" in said
    assert "huber_strength: distance=huber, smooth_l1 or mae" in said
    assert "backup_after_unit: cadences count steps here: checkpoint.every_steps=" in said
    assert "text_encoder.train, text_encoder.learning_rate: text towers of Stable Diffusion" in said


def test_simpletuners_configuration_and_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = imported(tmp_path, {"config.json": SIMPLETUNER, "backends.json": BACKENDS})
    assert cfg.model.network.block_out_channels == [1536, 1536]
    check(cfg, {
        "task.rank": 16, "task.alpha": 16.0, "task.dropout": 0.1, "task.cond_drop_prob": 0.2,
        "train.max_steps": 30000, "lr_scheduler.min_factor": pytest.approx(0.01), "optimizer.lr": 1e-4,
        "train.max_grad_norm": 1.5, "ema.decay": 0.995, "data.path": "/data/cats",
        "data.caption_from": "file", "data.captions.choose": "random",
        "data.size_filters": {"short_side": ">= 256"}, "data.crop": "random", "data.aspect_ratios": "wide",
        "model.image_size": 768, "sample.guidance_scale": 3.5,
    })  # fmt: skip
    assert cfg.train.precision == "fp32"
    said = capsys.readouterr().out
    assert "aws-secret" not in said
    assert "base_model_precision: frozen weights are bf16" in said
    assert "hub_model_id: cascade-train export" in said


def test_simpletuners_environment_file_and_backends_alone(tmp_path: Path) -> None:
    lines = (
        "# a comment\nexport MODEL_FAMILY='sdxl'\nexport LEARNING_RATE=8e-5 # fast\nMAX_NUM_STEPS=\"500\"\necho hi\n"
    )
    cfg = imported(tmp_path, {"config.env": lines}, "model=c_tiny", more=("data.path=cats",))
    check(cfg, {"optimizer.lr": 8e-5, "train.max_steps": 500, "train.global_batch_size": 4})
    cfg = imported(tmp_path, {"backends.json": BACKENDS}, "model=c_tiny", "behaviour=ours", more=("task=lora",))
    assert cfg.data.path == "/data/cats"


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ({"train_data_dir": "a", "learning_rate": "fast"}, (), "learning_rate becomes optimizer.lr here, and its"),
        ({"train_data_dir": "a", "train_batch_size": "two"}, (), "train_batch_size='two' must be a whole number"),
        ({"train_data_dir": "a", "max_train_epochs": 1.5}, (), "max_train_epochs becomes train.max_epochs here"),
        ({"train_data_dir": "a", "resolution": "big"}, (), "resolution='big' is of another type than its trainer"),
        ({"train_data_dir": "a", "lr_warmup_steps": "few"}, (), "reads: the warmup must be a number of steps"),
        ({"network_dim": -1, "network_module": "networks.lora"}, (), "network_dim becomes task.rank here"),
        ({"a": 1}, (), "Name its trainer by system="),
        ({"a": 1}, ("system=koya",), "system=koya is unknown; choose one of everydream, everydream1, kohya"),
        ({"train_data_dir": "a"}, ("flags=3",), "must begin with a flag such as --seed, not with 3"),
        ({"train_data_dir": "a"}, ('flags="--a \'b"',), "cannot be read: No closing quotation"),
        ("a = ", (), "cannot be read as TOML"),
        ([1, 2], (), "holds no keys and values"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_written(
    content: Any, arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / ("given.toml" if isinstance(content, str) else "given.json")
    source.write_text(content if isinstance(content, str) else json.dumps(content))
    out = tmp_path / "conf/experiment/mine.yaml"
    assert launch(["recipe", "import", str(source), f"out={out}", "model=c_tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_entry_of_a_table_leads_somewhere(name: str) -> None:
    """Each key of ours in a table is one of a composed configuration, and each entry says what becomes of the key."""
    table = load_table(name)
    cfg = checked("model=c_tiny", "task=lora")
    known = {"to", "of", "sd", "values", "as", "per", "over", "below", "also", "left", "same", "when", "read"} | {
        "unneeded", "missing", "yours"}  # fmt: skip
    entries = [entry for section in ("keys", "data") for entry in table.get(section, {}).values()]
    assert len(entries) > 30
    for entry in entries:
        assert isinstance(entry, str) or (entry and entry.keys() <= known), entry
        to = entry if isinstance(entry, str) else entry.get("to", [])
        for ours in [to] if isinstance(to, str) else to:
            assert ours.startswith(".") or ours.partition("@")[0].partition(".")[0] in {*cfg, "filter"}, entry


def test_flags_are_read_as_they_are_typed() -> None:
    assert read_flags("--a 1 --b --c=x --d 1e-4 2 --e False") == {
        "a": 1, "b": True, "c": "x", "d": ["1e-4", "2"], "e": False}  # fmt: skip
    assert (side(768), side("512,768"), side("1024x1024"), side([512, 512])) == (768, 640, 1024, 512)
    assert without_switches("a cat --w 3\n# no\nwell-known --things") == ["a cat", "well-known"]


@pytest.mark.parametrize(
    ("more", "model", "values"),
    [
        ({}, "StableDiffusion", {"objective.loss_weight.gamma": 5, "model.image_size": 512}),
        ({"v2": True, "v_parameterization": True}, "StableDiffusion", {"objective.loss_weight.target": "v"}),
        ({"pretrained_model_name_or_path": "sd_xl.safetensors", "zero_terminal_snr": True, "ip_noise_gamma": 0.1,
          "v_parameterization": True},
         "StableDiffusionXL",
         {"objective.schedule.rescale_betas_zero_snr": True, "model.weights": "sd_xl.safetensors"}),
    ],
)  # fmt: skip
def test_the_family_of_a_file_trains_with_its_own_timesteps(
    more: dict[str, Any], model: str, values: dict[str, Any], tmp_path: Path
) -> None:
    name = {} if "v2" in more else {"pretrained_model_name_or_path": "sd_v1-5.ckpt"}
    given = {"train_data_dir": "cats", "network_module": "networks.lora", "resolution": 512, "min_snr_gamma": 5}
    given |= name | more
    cfg = imported(tmp_path, {"train.json": given})
    check(cfg, {**values, "model._target_": f"cascade_train.models.stable_diffusion.stage.{model}"})
    assert cfg.objective.schedule._target_.endswith("DDPMSchedule")
    assert cfg.objective.target._target_.endswith("VTarget") == ("v_parameterization" in more)


def test_mindones_edm_and_onetrainers_stable_diffusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edm = "    denoiser_config: {params: {weighting_config: {target: gm.modules.EDMWeighting}}}\n    loss_fn"
    flags = "flags=--weight sd_xl_base_1.0_ms.ckpt --data_path coco"
    cfg = imported(tmp_path, {"edm.yaml": MINDONE.replace("    loss_fn", edm)}, flags)
    check(cfg, {"model._target_": "cascade_train.models.stable_diffusion.stage.StableDiffusionXL", "task.rank": 8})
    assert cfg.objective.schedule._target_.endswith("EDMTrainSchedule")
    sd = {"training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_15", "loss_weight_fn": "P2",
          "resolution": "512", "concepts": [{"path": "cats"}],
          "base_model_name": "runwayml/stable-diffusion-v1-5"}  # fmt: skip
    cfg = imported(tmp_path, {"sd.json": sd})
    assert cfg.objective.loss_weight._target_.endswith("ConstantLossWeight")
    said = capsys.readouterr().out
    assert "weight: a checkpoint of MindSpore" in said
    assert "P2 is Stable Cascade's: objective=ddpm" in said
    assert "base_model_name: they are the model's own" in said


def test_an_everydream_file_that_validates_on_a_folder_of_its_own_holds_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manual = {"validate_training": "true", "val_split_mode": "manual", "val_data_root": "val"}
    manual["val_split_proportion"] = 0.2
    files = {"train.json": {**EVERYDREAM, "useadam8bit": True}, "optimizer.json": {}, "validation.json": manual}
    cfg = imported(tmp_path, files, "model=c_1b")
    check(cfg, {"validate.share": None, "validate.every_steps": None})
    said = capsys.readouterr().out
    assert "validation.auto_split_proportion: nothing is held out: validate.every_steps, with validate.urls" in said
    assert "validation.manual_data_root: pack the folder as tars" in said
    assert "useadam8bit: optimizer=adamw_8bit" in said


def test_mindones_sizes_tables_and_what_else_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text("dir,text\n")
    source = yaml.safe_load(MINDONE)
    params = source["data"]["dataset_config"]["params"]
    params["multi_aspect"] = [[704, 1408], [1024, 1024]]
    source["model"]["params"]["conditioner_config"] = {"params": {"emb_models": [{"is_trainable": True}]}}
    cfg = imported(tmp_path, {"x.yaml": yaml.safe_dump(source)}, "model=c_1b", f"flags=--data_path {tmp_path}")
    assert cfg.data.aspect_ratios == ["1408/704", "1024/1024"]
    assert cfg.data.path == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert "emb_models: text encoders are frozen unless model.text_encoder.train=true" in capsys.readouterr().out

    def kind(name: str, flags: str) -> DictConfig:
        source["data"]["dataset_config"]["target"] = f"gm.data.dataset.Text2ImageDataset{name}"
        more = () if name == "DreamBooth" else ("task=lora",)
        return imported(tmp_path, {"x.yaml": yaml.safe_dump(source)}, "model=c_1b", f"flags={flags}", more=more)

    cfg = kind("DreamBooth", "--instance_data_path dog --instance_prompt 'a sks dog'")
    assert cfg.data._target_.endswith(".Folder")
    check(cfg, {"data.path": "dog", "data.captions.template": "a sks dog"})
    for name in ("ControlNet", "TextualInversion"):
        kind(name, f"--data_path {tmp_path}")
        said = capsys.readouterr().out
        assert "task: the file trains a control network (task=controlnet" in said
        assert "experiment=mine task=..." in said


def test_a_list_of_backends_of_the_hub_is_known_as_simpletuners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = {"id": "a", "type": "huggingface", "dataset_name": "x/y", "caption_strategy": "filename"}
    (tmp_path / "backends.json").write_text(json.dumps([backend]))
    assert launch(["recipe", "import", str(tmp_path / "backends.json"), f"out={tmp_path}/experiment/x.yaml"]) == 0
    assert "dataset_name: download the data set as files" in capsys.readouterr().out
