"""A key is taken over only where the composed recipe has its value; what is not certain is asked for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from cascade_train.__main__ import launch
from cascade_train.commands.recipe import ImportArgs, translate
from cascade_train.config.recipes.recipe import Kind, Recipe, is_group
from cascade_train.config.recipes.table import SYSTEMS, load_table
from tests.unit.config.composing import composed
from tests.unit.config.recipes.test_systems import EVERYDREAM, ONETRAINER, SIMPLETUNER
from tests.unit.config.seeds import SEEDS

GUI: dict[str, Any] = {
    "LoRA_type": "Standard", "adaptive_noise_scale": 0, "additional_parameters": "", "block_alphas": "",
    "bucket_no_upscale": True, "bucket_reso_steps": 64, "cache_latents": True, "caption_dropout_every_n_epochs": 0.0,
    "caption_dropout_rate": 0, "caption_extension": ".txt", "clip_skip": "1", "color_aug": False, "conv_alpha": 1,
    "conv_dim": 1, "enable_bucket": True, "epoch": 1, "factor": -1, "flip_aug": False, "full_bf16": False,
    "gradient_accumulation_steps": 1.0, "gradient_checkpointing": True, "keep_tokens": "0", "learning_rate": "0.0001",
    "lora_network_weights": "", "lr_scheduler": "constant", "lr_scheduler_num_cycles": "", "lr_scheduler_power": "",
    "lr_warmup": 0, "max_data_loader_n_workers": "0", "max_resolution": "1024,1024", "max_token_length": "75",
    "max_train_epochs": "", "mem_eff_attn": False, "min_snr_gamma": 5, "mixed_precision": "bf16",
    "multires_noise_discount": 0, "multires_noise_iterations": 0, "network_alpha": 32, "network_dim": 64,
    "network_dropout": 0, "noise_offset": 0.0357, "noise_offset_type": "Original", "num_cpu_threads_per_process": 2,
    "optimizer": "AdamW8bit", "optimizer_args": "", "prior_loss_weight": 1.0, "random_crop": False, "reg_data_dir": "",
    "resume": "", "sample_every_n_epochs": 0, "sample_every_n_steps": 0, "sample_prompts": "",
    "save_every_n_epochs": 1, "save_every_n_steps": 0, "scale_weight_norms": 0, "sdxl": True, "seed": "",
    "shuffle_caption": False, "stop_text_encoder_training": 0, "text_encoder_lr": 0.0001, "train_batch_size": 2,
    "train_data_dir": "", "unet_lr": "0.0001", "v2": False, "v_parameterization": False, "vae": "", "xformers": True,
}  # fmt: skip
"""The form of a preset of the kohya_ss GUI: its own keys, numbers as texts, empty texts for what is not set."""
ADAFACTOR = "scale_parameter=False relative_step=False warmup_init=False"
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({}, {"optimizer.lr": 1e-4, "train.max_epochs": 1, "train.max_steps": None, "model.image_size": 1024,
                   "task.rank": 64, "task.alpha": 32, "objective.offset_noise": 0.0357, "attention": "sdpa",
                   "train.micro_batch_size": 2, "sample.every_steps": None, "run.seed": 0}),
    "prodigy": ({"optimizer": "Prodigy", "unet_lr": 1.0, "learning_rate": 1.0, "text_encoder_lr": 1.0, "epoch": 20,
                 "optimizer_args": '"d0=1e-5" "d_coef=0.8" "weight_decay=0.4" "betas=0.9,0.99"'},
                {"optimizer.algorithm.d0": 1e-5, "optimizer.weight_decay": 0.4, "optimizer.algorithm.d_coef": 0.8,
                 "optimizer.algorithm.betas": [0.9, 0.99], "train.max_epochs": 20}),
    "adafactor": ({"optimizer": "Adafactor", "optimizer_args": ADAFACTOR, "unet_lr": 3e-6, "text_encoder_lr": 3e-6},
                  {"optimizer.algorithm._target_": "torch.optim.AdamW", "optimizer.lr": 3e-6}),
    "sd15": ({"sdxl": False, "max_resolution": "512,650", "clip_skip": 2, "max_train_steps": "320", "seed": "1234",
              "xformers": "xformers", "max_train_epochs": ""},
             {"model.text_encoder.hidden_layer": -2, "train.max_steps": 320, "model.image_size": 576,
              "run.seed": 1234}),
    "multires": ({"noise_offset_type": "Multires", "multires_noise_iterations": 8, "multires_noise_discount": 0.2,
                  "sdxl": False, "max_train_epochs": "16"},
                 {"objective.noise.levels": 8, "objective.noise.discount": 0.2, "objective.offset_noise": 0.0,
                  "train.max_epochs": 16}),
    "finetune": (dict.fromkeys(("LoRA_type", "network_dim", "network_alpha", "network_dropout", "sdxl", "unet_lr"))
                 | {"sdxl_checkbox": True, "train_batch_size": "1", "dataset_repeats": "10", "xformers": "sdpa",
                    "learning_rate": "0.0000166666666", "additional_parameters": "--flip_aug --seed 7"},
                 {"optimizer.lr": 1.66666666e-05, "data.flip_prob": 0.5, "run.seed": 7, "train.micro_batch_size": 1}),
    "lokr": ({"LoRA_type": "LyCORIS/LoKr", "sdxl": False}, {"objective.offset_noise": 0.0357}),
    "flux": ({"LoRA_type": "Flux1", "flux1_checkbox": True, "sdxl": False}, {"train.micro_batch_size": 2}),
}  # fmt: skip
ASKED = {"lokr": ["task=lora"], "flux": ["task=lora", "model=sdxl"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, as the one that one works in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    return tmp_path


def told(source: Any, folder: Path, /, *more: str, **options: Any) -> tuple[Recipe, DictConfig]:
    """Import values, assert that all that is said to be taken over is true, and return recipe and configuration.

    `more` chooses what the recipe asks for.
    """
    args = ImportArgs(**{"source": str(folder / "given.json"), "out": "experiment/mine.yaml", **options})
    recipe = translate(source, args)
    (folder / "experiment/mine.yaml").write_text(recipe.text(title="A file.", command="cascade-train"))
    cfg = composed("experiment=mine", *(each for each in more if each.split("=")[0] in recipe.asked), extra=folder)
    taken = recipe.taken()
    assert {key for key, (kind, _) in recipe.fates.items() if kind is Kind.TAKEN} <= taken.keys()
    for key, ours in taken.items():
        assert recipe.fates.get(key, (Kind.TAKEN,))[0] is not Kind.SAME, key
        wrong = {name: value for name, value in ours.items() if not is_group(name)}
        wrong = {name: value for name, value in wrong.items() if OmegaConf.select(cfg, name, default=...) != value}
        assert not wrong, key
    return recipe, cfg


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_the_kohya_gui_import_and_all_that_is_taken_over_is_true(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = PRESETS[name]
    preset = {key: value for key, value in (GUI | changes).items() if value is not None}
    (folder / "given.json").write_text(json.dumps(preset))
    assert launch(["recipe", "import", "given.json", "out=other/experiment/mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert "Not known" not in said
    recipe, cfg = told(preset, folder, *ASKED.get(name, []))
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected
    assert sorted(recipe.asked) == sorted(each.partition("=")[0] for each in ASKED.get(name, []))
    assert ("scale_parameter" in said) == (name == "adafactor")


OWN = {"pretrained_model_name_or_path": "sd_v1-5.ckpt", "train_data_dir": "cats", "resolution": 512}
ED = EVERYDREAM | {"enable_zero_terminal_snr": None}
OT = ONETRAINER | {"model_type": "STABLE_DIFFUSION_15", "layer_filter_preset": "attn-mlp"}
ST = {key.removeprefix("--"): value for key, value in SIMPLETUNER.items()} | {"data_backend_config": None}
SAMPLES = {"side": 512, "list": "a cat", "prompts": "a cat on a mat", "last": "x.SGD", "betas": 0.8, "number": 3.0,
           "numbers": "0.5,0.9", "parts": "a, b", "crop": [{"target": "a.CenterCrop"}], "shapes": [[64, 128]],
           "samples": [{"prompt": "a cat"}], "or_off": 2, "whole": 64, "warmup": 9,
           "warmup_or_all": 9, "decay": 9}  # fmt: skip


@functools.cache
def ours() -> DictConfig:
    return composed("model=sdxl", "task=lora", "data=webdataset")


def sample(row: Any, variant: int) -> Any:
    """Return one of the values that a row takes."""
    row = {"to": row} if isinstance(row, str) else row
    row = row.get("sd", row) if isinstance(row.get("sd", row), dict) else {"to": row["sd"]}
    every = [*row.get("values", {}), *row.get("left", {})]
    if "same" in row or every:
        every += row["same"] if isinstance(row.get("same"), list) else [row["same"]] if "same" in row else []
        return every[variant % len(every)]
    to = row.get("to", "")
    if "as" in row or isinstance(to, list):
        return SAMPLES.get(row.get("as", ""), 4)
    default = OmegaConf.select(ours(), to if to.partition(".")[0] in ours() else "run")
    if isinstance(default, bool | int | ListConfig):
        number = [0.5, 0.9] if isinstance(default, ListConfig) else 4
        return variant == 1 if isinstance(default, bool) else number
    texts = ("run.name", "run.dir", "tracker.", "weights", "path", "urls", "negative", "separator", "key", "prompt")
    counts = variant == 1 or any(part in to for part in ("epochs", "steps", "keep", "count", "rank", "seed", "samples"))
    return "words" if any(part in to for part in texts) else 4 if counts else 0.25


@pytest.mark.parametrize("variant", range(3))
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_of_every_table_that_is_taken_over_is_in_the_composed_recipe(
    system: str, variant: int, folder: Path
) -> None:
    table = load_table(system)
    given = {key: sample(row, variant) for key, row in {**table["data"], **table["keys"]}.items() if "*" not in key}
    given |= dict.fromkeys(table["batch"].values(), 2)
    given |= dict.fromkeys((*table.get("follows", ()), "network_args"))
    given |= {"resume_ckpt": "sd_v1-5", "model_version": "1B", "text_encoder_lr": 1}
    given |= {"captions_getter": ["txt", "identity"], "dataset_filters": [["a", "> 1"]]}
    given |= {"controlnet_filter": "CannyFilter", "webdataset_path": "a.tar", "clip_skip": 2, "model_type": "lora"}
    given |= {key: 1e-6 for key in given if "learning_rate" in key or key.endswith("overrides.lr")}
    given |= {key: 1 for key in given if "layer_skip" in key}
    given |= {"experiment.num_examples_to_see": 64, "stop_text_encoder_training": 0}
    given = {key: value for key, value in given.items() if not key.endswith("emb_models")}
    model = "c_1b" if system == "official" or variant == 2 else "sdxl"
    behaviour = "ours" if variant == 2 else None
    recipe, cfg = told(given, folder, "task=lora", system=system, model=model, behaviour=behaviour)
    assert len(recipe.taken()) > 10
    for key, row in table["keys"].items():
        kind = recipe.fates.get(key, (None,))[0]
        if isinstance(row, str) and kind is Kind.TAKEN and "betas" not in row:
            assert OmegaConf.select(cfg, row) == given[key], key


@pytest.mark.parametrize(
    ("system", "given", "asked"),
    [
        ("kohya", {"pretrained_model_name_or_path": "juggernaut.safetensors", "resolution": 1024}, {"model"}),
        ("kohya", OWN | {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}, {"task"}),
        ("kohya", OWN | {"network_args": ["algo=lokr"]}, {"task"}),
        ("kohya", OWN | {"network_dim": 8}, {"task"}),
        ("mindone", {"optim": "adamw", "use_lora": True, "lora_rank": 4, "train_batch_size": 4}, {"model"}),
        ("onetrainer", {"model_type": "STABLE_DIFFUSION_15_INPAINTING", "training_method": "FINE_TUNE"}, {"model"}),
        ("onetrainer", {"training_method": "EMBEDDING"}, {"task"}),
        ("simpletuner", {"model_family": "sdxl", "model_type": "lora", "lora_type": "lycoris"}, {"task"}),
        ("simpletuner", {"model_family": "flux", "model_type": "lora"}, {"model"}),
        ("everydream", {"resume_ckpt": "mine.ckpt", "data_root": "a"}, {"model"}),
        ("open_diffusion", {"system": {}, "experiment": {}, "dataset": {}, "model": {"pretrained": "x/y"}}, {"model"}),
    ],
)
def test_model_and_task_are_asked_for_where_they_are_not_certain(
    system: str, given: dict[str, Any], asked: set[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, _ = told(given, folder, "task=lora", "model=sdxl", system=system)
    assert recipe.asked == asked
    text = (folder / "experiment/mine.yaml").read_text()
    assert not any(f"/{group}:" in text for group in asked)
    (folder / "given.json").write_text(json.dumps(given))
    assert launch(["recipe", "import", "given.json", "out=other/experiment/mine.yaml", f"system={system}"]) == 0
    said = capsys.readouterr().out
    for group in asked:
        assert f"{group}=" in said.partition("Left to you:")[2]
        assert f"{group}=..." in said.splitlines()[0]


@pytest.mark.parametrize(
    ("system", "given", "key", "kind"),
    [
        ("kohya", OWN | {"prior_loss_weight": 0.3}, "prior_loss_weight", Kind.MISSING),
        ("everydream", ED | {"resume_ckpt": "sd_v1-5"}, "seed", Kind.YOURS),
        ("simpletuner", ST | {"seed": -1}, "seed", Kind.YOURS),
        ("onetrainer", OT | {"optimizer": {"optimizer": "LION", "eps": 1e-6}}, "optimizer.eps", Kind.MISSING),
        ("everydream1", SEEDS["everydream/standard"]["file"], "data.params.validation.params.repeats", Kind.MISSING),
        ("kohya", OWN | {"xformers": True}, "xformers", Kind.UNNEEDED),
        ("onetrainer", OT | {"optimizer": {"optimizer": "ADAFACTOR", "scale_parameter": False}},
         "optimizer.scale_parameter", Kind.YOURS),
        ("kohya", OWN | {"optimizer_type": "adafactor"}, "optimizer_type", Kind.YOURS),
    ],
)  # fmt: skip
def test_what_a_recipe_does_not_do_is_not_said_to_be_taken_over(
    system: str, given: Any, key: str, kind: Kind, folder: Path
) -> None:
    recipe, _ = told(given, folder, system=system)
    assert recipe.fates[key][0] is kind


def test_what_follows_the_model_is_left_with_it(folder: Path) -> None:
    given = {"pretrained_model_name_or_path": "mine.ckpt", "min_snr_gamma": 5, "clip_skip": 2, "resolution": 640}
    recipe, cfg = told(given, folder, "model=sd21", system="kohya")
    assert recipe.fates["min_snr_gamma"][0] is recipe.fates["clip_skip"][0] is Kind.YOURS
    assert cfg.objective.target._target_.endswith("VTarget")
    assert cfg.model.image_size == 640
