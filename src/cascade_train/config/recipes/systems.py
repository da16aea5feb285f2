"""From a laid-out file to a recipe, by the table of its trainer, and what the tables leave to code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.arguments import parameters
from cascade_train.config.recipes.layouts import Given, lay_out, take_datasets
from cascade_train.config.recipes.official import finish_official
from cascade_train.config.recipes.reading import list_folder
from cascade_train.config.recipes.recipe import Kind, Recipe, own_objective
from cascade_train.config.recipes.table import OFF, Values, chosen, fits, take, whole
from cascade_train.config.recipes.text_towers import take_towers
from cascade_train.config.targets import import_target
from cascade_train.errors import ConfigError

SILENT = "what the file does not say"
WARMUP = "lr_scheduler.warmup_steps"
LONG, EPS = "model.text_encoder.long_captions", "optimizer.algorithm.eps"


def from_source(
    system: str, source: Any, *, path: Path, flags: Values, ranks: int, model: str | None, fills: bool
) -> Recipe:
    """Translate one configuration; a ConfigError where a value has another type than its trainer reads.

    `flags` override the file; `model` trains in the place of the file's; `fills` takes the trainer's defaults where the
    file says nothing. Where the file does not say for certain what trains, the recipe has what is the same for all
    models that may be meant, and asks.
    """
    given = lay_out(system, source, path, flags=flags, ranks=ranks, fills=fills)
    table = given.table
    families = chosen(given.keys, table["choices"]["model"])
    certain = families if len(families) == 1 else []
    if "closed" in table and not certain:
        key = table["closed"]
        raise ConfigError(f"{key}={given.keys.get(key)} is no model of {table['title']}. Mend it in the file.")
    models = [model] if model else certain or list(table["choices"]["model"])
    recipe = _common([_translated(given, each, certain) for each in models])
    if len(models) > 1:
        options = ", ".join(f"model={each}" for each in models)
        named = _stranger(given, certain)
        why = (
            f"{named} is none of the families here"
            if named
            else "the file does not say for certain which one it trains"
        )
        recipe.ask("model", f"{why}. Import again with {options}")
    elif certain and models != certain:
        recipe.remarks.append(f"The file trains model={certain[0]}; model={models[0]} trains here.")
    return recipe


def _stranger(given: Given, certain: Sequence[str]) -> str:
    """Return the keys and values by which a file names a model that is not here; an empty text where it names none."""
    keys = given.keys
    named = [f"{key}={keys[key]}" for key in given.table.get("family", ()) if keys.get(key) not in OFF]
    return "" if certain else ", ".join(named)


def _common(recipes: Sequence[Recipe]) -> Recipe:
    """Return the intersection of several recipes of one file; the rest is left to the user."""
    if len(recipes) == 1:
        return recipes[0]
    first, why = recipes[0], "it follows the model: import again with model="
    every = [each.groups | each.values for each in recipes]
    differing = [key for key, value in every[0].items() if any(each.get(key, ...) != value for each in every)]
    alone = {key for each, recipe in zip(every, recipes, strict=True) for ours in each.keys() - every[0].keys()
             for key in recipe.origins.get(ours, ())}  # fmt: skip
    for ours in differing:
        if ours != "model":
            first.drop(ours, why)
    for key in sorted(alone & first.taken().keys()):
        for ours in first.taken().get(key, {}):
            first.drop(ours, why)
    for key, (kind, _) in first.fates.copy().items():
        if any(key in each.fates and each.fates[key][0] is not kind for each in recipes):
            first.note(key, why)
    return first


def _translated(given: Given, model: str, certain: list[str]) -> Recipe:
    """Return the recipe of a file where one model trains."""
    table = given.table
    tasks = chosen(given.keys, table["choices"]["task"])
    recipe = Recipe(
        groups={"task": tasks[0] if len(tasks) == 1 else "finetune", "model": model} | table.get("groups", {}),
        implied=set(given.implied),
    )
    if len(tasks) != 1:
        recipe.ask("task", table["choices"].get("ask", "the file does not say for certain: task=finetune or task=lora"))
    inherited = {key: value for key, value in given.keys.items() if key in table["data"] and key not in table["keys"]}
    own = {key: value for key, value in given.keys.items() if key not in inherited}
    take(recipe, own, table, given.path)
    if len(tasks) == 1:
        _note_choice(recipe, given, "task")
    if certain == [model]:
        _note_choice(recipe, given, "model")
    _weights(recipe, given, certain)
    take_datasets(recipe, inherited, given)
    _batch(recipe, given)
    _adafactor(recipe, given)
    _schedule_free(recipe, given)
    FINISHES.get(given.system, lambda *_: None)(recipe, given)
    _notes(recipe, given)
    take_towers(recipe, given)
    if recipe.groups["model"].startswith("sdxl") and recipe.values.get(LONG):
        recipe.put(recipe.origins[LONG], {LONG: True, LONG.replace("encoder", "encoder_2"): True})  # both towers
    _objective(recipe, given.keys, divides_by_snr=given.system == "everydream")
    if missing := {key: value for key, value in given.ours.items() if key not in recipe.values}:
        recipe.implied.add(SILENT)
        recipe.put(SILENT, missing)
    told = (Kind.TAKEN, Kind.YOURS)  # of what the file does not say
    recipe.fates = {k: fate for k, fate in recipe.fates.items() if k not in recipe.implied or fate[0] in told}
    recipe.fates |= given.notes
    for key in sorted(given.open):
        if recipe.fates.get(key, (None,))[0] in (None, Kind.SAME):
            recipe.note(key, "its value is none of the file's, and is not looked up: set what it means here")
    for key in sorted(own.keys() - recipe.fates.keys() - given.implied - recipe.taken().keys()):
        is_off = given.keys[key] in OFF
        why, kind = ("it is off there, as here", Kind.SAME) if is_off else ("nothing is taken from it", Kind.YOURS)
        recipe.note(key, why, kind)
    return recipe


def _note_choice(recipe: Recipe, given: Given, group: str) -> None:
    """Note by which keys a file chooses the option of a group."""
    for condition in given.table["choices"][group][recipe.groups[group]]:
        keys = {key for key, want in condition.items() if given.keys.get(key) is not None and want is not False}
        if fits(given.keys, condition) and keys - given.implied:
            recipe.put(sorted(keys - given.implied), {group: recipe.groups[group]})
            return


def _weights(recipe: Recipe, given: Given, certain: list[str]) -> None:
    """Take the weights of the file's model; another takes none of them."""
    key = str(given.table.get("weights"))
    weights = given.keys.get(key)
    if weights in OFF or recipe.fates.get(key, (None,))[0] is Kind.YOURS:
        return
    others = () if _stranger(given, certain) else given.table["choices"]["model"]
    if recipe.groups["model"] not in (certain or others):
        recipe.note(key, "its weights are those of another model", Kind.MISSING)
    elif str(weights).endswith("_ms.ckpt"):
        recipe.note(key, "a checkpoint of MindSpore: model.weights takes diffusers' folder, or safetensors")
    elif certain and str(weights) in PUBLISHED:
        recipe.note(key, "they are the model's own", Kind.SAME)
    else:
        recipe.put(key, {"model.weights": weights})


def _batch(recipe: Recipe, given: Given) -> None:
    """Set the batches of a rank and of a step from that of a pass, or the former from that of a step."""
    batch, ranks = given.table["batch"], given.ranks
    passes = whole(given.keys, batch["passes"])
    keys = [key for key in (batch["passes"],) if given.keys.get(key) is not None]
    if "whole" not in batch:
        micro = whole(given.keys, batch["micro"])
        sizes = {"train.micro_batch_size": micro, "train.global_batch_size": micro * passes * ranks}
        recipe.put([*keys, batch["micro"]], sizes)
    elif passes > 1:
        size = whole(given.keys, batch["whole"])
        if size % (passes * ranks):
            raise ConfigError(
                f"{batch['whole']}={size} does not divide into {batch['passes']}={passes} passes of {ranks} ranks. "
                "Give the number of processes: ranks=<number>."
            )
        recipe.put(keys, {"train.micro_batch_size": size // passes // ranks})
    elif keys:
        recipe.note(keys[0], "1 is what happens here", Kind.SAME)


def _notes(recipe: Recipe, given: Given) -> None:
    """Note what several keys of the configuration, or of one of its datasets, mean together."""
    laid = [{**given.keys, **own} for _, own in given.datasets] or [given.keys]
    for name, row in given.table.get("notes", {}).items():
        if any(fits(each, row["when"]) for each in laid):
            recipe.note(name, row["yours"])


def _adafactor(recipe: Recipe, given: Given) -> None:
    """Leave an Adafactor to the user that does what torch's does not."""
    if recipe.groups.get("optimizer") != "adafactor" or "adafactor" not in given.table:
        return
    scale, relative = (given.table["adafactor"][each] for each in ("scale", "relative"))
    said = [key for key in (scale, relative) if key not in recipe.implied]
    is_torchs = given.keys.get(scale) not in OFF and given.keys.get(relative) in OFF
    if EPS in recipe.values:
        other = "torch's Adafactor adds it elsewhere" if is_torchs else "it is Adafactor's, and optimizer=adamw trains"
        recipe.drop(EPS, f"{other}: {EPS} stays the default", Kind.MISSING)
    if is_torchs:
        recipe.put(said, {"optimizer": "adafactor"})
        return
    why = (
        "scale_parameter=false and relative_step=true are not supported: torch's Adafactor multiplies the learning "
        "rate by the size of each weight. optimizer=adamw trains in its place, at the file's rate"
    )
    recipe.drop("optimizer", why)
    for key in said:
        recipe.note(key, why)


def _schedule_free(recipe: Recipe, given: Given) -> None:
    """Drop the schedule and the warmup of an optimizer that has none."""
    wanted = given.table.get("schedule_free")
    for ours in [*recipe.groups, *recipe.values] if wanted and fits(given.keys, wanted) else ():
        if ours.partition(".")[0] == "lr_scheduler":
            recipe.drop(ours, "a schedule-free optimizer has a constant rate, without a warmup, there", Kind.UNNEEDED)


def _objective(recipe: Recipe, given: Values, *, divides_by_snr: bool) -> None:
    """Choose the objective that says the same on the timesteps of the model."""
    wanted, weight = recipe.groups.get("objective", ""), "objective.loss_weight.gamma"
    if wanted not in ("v", "min_snr", "debiased"):
        return
    said = [key for key, value in VELOCITY.items() if given.get(key) == value]
    is_velocity = bool(said) or own_objective(recipe.groups["model"]) == "ddpm_v"
    if wanted == "debiased" and is_velocity:
        why = "no objective has this weight where the network predicts the velocity: the loss is not weighted"
        recipe.drop("objective", why, Kind.MISSING)
        recipe.put(said, {"objective": "ddpm_v" if recipe.timesteps else "v"} if said else {})
        return
    if weight in recipe.values and fits(given, {"debiased_estimation_loss": True}):
        recipe.note("debiased_estimation_loss", "of two weights that of min_snr_gamma alone is taken", Kind.MISSING)
    wanted = "min_snr" if weight in recipe.values else wanted  # whose target may be the velocity
    option = f"ddpm_{wanted}" if recipe.timesteps else wanted
    recipe.put({*recipe.origins["objective"], *recipe.origins.get(weight, ())}, {"objective": option})
    if wanted == "min_snr" and is_velocity:
        target = {"objective.target._target_": "cascade_train.diffusion.target.VTarget"}
        target |= {} if divides_by_snr else {"objective.loss_weight.target": "v"}
        recipe.put(said or recipe.origins["objective"], target)


def _finish_kohya(recipe: Recipe, given: Given) -> None:
    """Take an alpha of 0 as sd-scripts does, networks/lora.py:71, and schedules that step once for each rank."""
    if given.keys.get("network_alpha") == 0:
        rank = given.keys.get("network_dim")
        recipe.put("network_alpha", {"task.alpha": RANK if rank is None else rank})
    for ours in sorted({WARMUP, "lr_scheduler.decay_steps"} & recipe.values.keys()):
        recipe.values[ours] = max(1, recipe.values[ours] // given.ranks)


def _finish_everydream(recipe: Recipe, given: Given) -> None:
    """Say what EveryDream 2 does with warmup and decay: optimizer/optimizers.py:219."""
    if recipe.groups.get("lr_scheduler", "constant") == "constant":
        if WARMUP in recipe.values:
            recipe.drop(WARMUP, "its constant schedule has no warmup", Kind.UNNEEDED)
        return
    if given.fills and WARMUP not in recipe.values:
        recipe.note("lr_warmup_steps", f"2 % of the decay there: {WARMUP}=")
    if given.fills and all(given.keys.get(key) in OFF for key in DECAYS):
        recipe.note(DECAYS[0], "the decay is 1.5 times as long as the run there: lr_scheduler.min_factor=0.25")


DECAYS = ("lr_decay_steps", "optimizer.base.lr_decay_steps")
RANK = 4
"""Of sd-scripts' adapters where the file says none: networks/lora.py:430."""


def _finish_open_diffusion(recipe: Recipe, laid: Given) -> None:
    """Take the network and its frozen parts, the files of the data, and the length in steps."""
    given = laid.keys
    if given.get(WIDTH) is not None and given[WIDTH] == WIDTHS.get(recipe.groups["model"]):
        _network(recipe, given)
    kind, place = recipe.groups["data"], "dataset.params.path"
    if given.get(place) is not None:
        recipe.put(place, {"data.urls" if kind in ("webdataset", "classification") else "data.path": given[place]})
    if kind == "csv":
        recipe.note("dataset.params", "the columns of its table are data.image_column and data.caption_column here")
    filters = {key.removeprefix(FILTERS): value for key, value in given.items() if key.startswith(FILTERS)}
    if filters:
        recipe.put([f"{FILTERS}{key}" for key in filters], {"data.row_filters": filters})
    key = "experiment.num_examples_to_see"
    if given.get(key) is not None:
        recipe.put(key, {"train.max_steps": -(-int(given[key]) // recipe.values["train.global_batch_size"])})
    else:
        recipe.note(key, "train.max_steps=")


def _network(recipe: Recipe, given: Values) -> None:
    """Take the architecture of the network, and the weights of the frozen parts beside one that begins from nothing."""
    levels = len(given.get(f"{UNET}block_out_channels") or ())
    known = parameters(import_target(ARCHITECTURE))[0]
    for key, value in given.items():
        name = key.removeprefix(UNET)
        if key.startswith(UNET) and name in known and value is not None:
            listed = name in ("attention_head_dim", "transformer_layers_per_block") and isinstance(value, int)
            recipe.put(key, {f"model.network.{name}": [value] * levels if listed else value})
    if given.get("model.pretrained") is not None:
        return
    if any(given.get(f"model.{part}.pretrained") is None for part in FROZEN):
        recipe.note(
            "a network from nothing", "model.weights=null, with the weights of the frozen parts: docs/weights.md"
        )
        return
    recipe.values["model.weights"] = None
    for part, (ours, more) in FROZEN.items():
        key = f"model.{part}.pretrained"
        recipe.put(key, {f"model.{ours}": given[key], **more})


UNET, WIDTH = "model.unet.params.", "model.unet.params.cross_attention_dim"
ARCHITECTURE = "cascade_train.models.stable_diffusion.unet_config.ConditionUNetConfig"
WIDTHS = {"sd15": 768, "sd21_base": 1024}
FROZEN: dict[str, tuple[str, dict[str, str]]] = {
    "vae": ("vae.weights", {}),
    "text_encoder": ("text_encoder.weights", {"model.text_encoder.subfolder": "text_encoder"}),
    "tokenizer": ("text_encoder.tokenizer", {"model.text_encoder.tokenizer_subfolder": "tokenizer"}),
}
"""Frozen part -> our key of its pipeline's place, below model, and what is set beside."""
FILTERS = "dataset.params.filters."


def _finish_mindone(recipe: Recipe, laid: Given) -> None:
    given = laid.keys
    if recipe.groups["model"] == "sdxl":
        _conditioner(recipe, given)
    kind = str(given.get("data.dataset_config.target", "")).rpartition(".")[2]
    tars = "wds" in kind.lower() or "webdataset" in kind.lower()
    data = "folder" if "DreamBooth" in kind else "webdataset" if tars else "csv"
    recipe.put("data.dataset_config.target", {"data": data})
    if tars and given.get("data_path"):
        recipe.put("data_path", {"data.urls": given["data_path"]})
    elif given.get("data_path"):  # all tables of a folder are read
        folder = str(given["data_path"]).rstrip("/")
        listed = list_folder(folder, laid.path)
        if listed is None:
            recipe.note("tables of data_path", "they are not listed, as they are not beside the file: data.path=[...]")
        paths = [str(each) for each in listed or () if each.suffix == ".csv"] or [f"{folder}/img_txt.csv"]
        columns = {"data.image_column": "dir", "data.caption_column": "text"}
        recipe.put("data_path", {"data.path": paths if len(paths) > 1 else paths[0], **columns})
    if any(each.get("is_trainable") for each in given.get(EMBEDDERS) or [] if isinstance(each, dict)):
        recipe.note(EMBEDDERS, "text encoders are frozen unless model.text_encoder.train=true, of Stable Diffusion")


def _conditioner(recipe: Recipe, given: Values) -> None:
    """Take the layers of SDXL's text towers, and which sizes of a picture are conditions."""
    sizes = set()
    towers: dict[str, Any] = {}
    for each in given.get(EMBEDDERS) or []:
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
        recipe.put(EMBEDDERS, towers)


EMBEDDERS = "model.params.conditioner_config.params.emb_models"
CLIP_LAYERS = 12
"""Of SDXL's first text tower, whose hidden states MindONE counts from the embeddings on."""
OPEN_CLIP_LAYERS = {"last": -1, "penultimate": -2}

PUBLISHED = {
    *("stabilityai/stable-cascade-prior", "stabilityai/stable-cascade", "stabilityai/stable-diffusion-xl-base-1.0"),
    *("runwayml/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    *(f"{owner}/stable-diffusion-2-1{kind}" for owner in ("stabilityai", "sd2-community") for kind in ("", "-base")),
}
"""Weights that the models of their families have by themselves, under their former names too."""

VELOCITY = {
    **{"v_parameterization": True, "force_v_prediction": True, "prediction_type": "v_prediction"},
    "model.noise_scheduler_training.params.prediction_type": "v_prediction",
}
"""Keys by which a network predicts the velocity, whatever its weights."""
FINISHES: dict[str, Callable[[Recipe, Given], None]] = {
    "official": finish_official,
    "kohya": _finish_kohya,
    "everydream": _finish_everydream,
    "open_diffusion": _finish_open_diffusion,
    "mindone": _finish_mindone,
}
"""By system: what ties several keys together."""
