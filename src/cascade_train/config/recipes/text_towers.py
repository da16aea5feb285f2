"""Text towers that other trainers train beside Stable Diffusion's network: their rates, layers and adapters.

By `towers` of a table. Of the cascade they are left to the user.
"""

from __future__ import annotations

from typing import Any

from cascade_train.config.recipes.layouts import Given
from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.config.recipes.table import OFF, Values
from cascade_train.errors import ConfigError

Rates = list[float | None]
"""Learning rate of each text tower; 0 = frozen, None = the network's."""
FIRST, SECOND = "model.text_encoder", "model.text_encoder_2"

OTHER_SCRIPTS = (
    *("network_module", "LoRA_type", "network_dim", "network_args.algo", "token_string"),
    *("controlnet_model_name_or_path", "in_json", "metadata_file"),
)
"""Keys of sd-scripts that train_db.py does not read."""
STOP = "stop_text_encoder_training"
"""The step of sd-scripts' train_db.py from which the text tower is frozen; 0 or less = from the beginning."""
CLIP_EMBEDDERS = ("FrozenCLIPEmbedder", "FrozenOpenCLIPEmbedder2")
"""MindONE's classes of SDXL's two text towers."""


def take_towers(recipe: Recipe, laid: Given) -> None:
    """Train the text towers that a trainer's file trains, at its rates."""
    if not recipe.timesteps or "towers" not in laid.table:
        return
    system, given, said = laid.system, laid.keys, laid.keys.keys() - laid.implied
    spec, is_lora = laid.table["towers"], recipe.groups["task"] == "lora"
    towers = [FIRST, SECOND] if recipe.groups["model"].startswith("sdxl") else [FIRST]
    _take_layers(recipe, laid, towers)
    if is_lora and system == "kohya":
        recipe.put("network_module", {"task.module_filters": [".attentions."]})
    names = {*spec["keys"], *spec.get("rates", ())} & said
    try:
        key, read, rates = _rates(system, given, spec, len(towers), is_lora)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(sorted(names))}: of another type than its trainer reads: {error}. Mend it in the file."
        ) from error
    trained = {tower: rate for tower, rate in zip(towers, rates, strict=True) if rate != 0}
    mentioned, unread = sorted(names | ({key} & said)), names - read
    unused = [name for name in mentioned if not trained or name in unread or (given[name] in OFF and name != key)]
    if trained and is_lora and "adapted" not in spec:
        recipe.note(key, "adapters of text towers: task.text_encoder_filters=[.self_attn]")
    elif trained and is_lora and len(trained) < len(towers):
        for name in sorted({key, *mentioned}):
            recipe.note(name, "adapters go into both text towers, or none: task.text_encoder_filters", Kind.MISSING)
    elif trained:
        ours = dict.fromkeys([f"{tower}.train" for tower in trained], True)
        ours = {"task.text_encoder_filters": spec["adapted"]} if is_lora else ours
        own = {tower: rate for tower, rate in trained.items() if rate not in (None, recipe.values.get("optimizer.lr"))}
        recipe.put({key, *mentioned} - {*unused}, ours | {f"{tower}.lr": rate for tower, rate in own.items()})
        recipe.implied |= {key} - said
        if key == STOP and key in said:
            recipe.put(STOP, {f"{FIRST}.train": True, f"{FIRST}.stop_after": int(given[STOP])})
    for name in [name for name in unused if name not in recipe.taken()]:
        unset = trained and given[name] is None and name not in unread
        recipe.note(name, "nothing is set" if unset else "no text tower trains by it", Kind.SAME)


def _take_layers(recipe: Recipe, given: Given, towers: list[str]) -> None:
    """Take the layer whose output is the text, counted from the end."""
    found = {"clip_skip": (FIRST, 0)} if len(towers) == 1 else {}  # of SDXL, sd-scripts passes over it
    found |= {f"{tower.removeprefix('model.')}_layer_skip": (tower, len(towers)) for tower in towers}
    for key, (tower, more) in found.items():
        if key in given.table["keys"] and given.keys.get(key) is not None:
            recipe.put(key, {f"{tower}.hidden_layer": -max(1, more + int(given.keys[key]))})


def _rate(value: Any, default: float | None = None) -> float | None:
    if isinstance(value, bool):
        raise TypeError(f"{value} is no learning rate")
    return default if value is None else float(value)


def _rates(system: str, given: Values, spec: Values, count: int, is_lora: bool) -> tuple[str, set[str], Rates]:
    """Return the key by which towers train, the keys that the trainer looks at, and the rates."""
    if system == "kohya":
        return _kohya_adapters(given, count) if is_lora else _kohya(given, count)
    if system == "mindone":
        (key,) = spec["keys"]
        listed = [each for each in given.get(key) or [] if isinstance(each, dict)]
        trained = {str(each.get("target", "")).rpartition(".")[2] for each in listed if each.get("is_trainable")}
        return key, {key}, [None if kind in trained else 0.0 for kind in CLIP_EMBEDDERS[:count]]
    keys, names = ((spec.get(each, [""]) * count)[:count] for each in ("keys", "rates"))
    own, is_frozen = given.get(spec.get("own", "")), spec.get("frozen", False)
    trains = [not given.get(key, True) if is_frozen else given.get(key) not in OFF for key in keys]
    rates = [_rate(given.get(name), own) if on else 0.0 for name, on in zip(names, trains, strict=True)]
    return next((key for key, rate in zip(keys, rates, strict=True) if rate != 0), keys[0]), {*keys, *names}, rates


def _kohya_adapters(given: Values, count: int) -> tuple[str, set[str], Rates]:
    """Adapters go to text towers too unless the file says no."""
    rates = None if given.get("text_encoder_lr") == [] else given.get("text_encoder_lr")
    frozen = given.get("network_train_unet_only", rates is None) or given.get("cache_text_encoder_outputs")
    listed = rates if isinstance(rates, list) else [rates]
    some = [_rate(each, given.get("learning_rate")) for each in (listed * count)[:count]]
    keys = ["network_train_unet_only", "text_encoder_lr"]
    return keys[rates is not None], {*keys}, [0.0] * count if frozen else some


def _kohya(given: Values, count: int) -> tuple[str, set[str], Rates]:
    """Whole towers train where the file says so.

    train_db.py trains the tower of 1.x and 2.x by itself, up to a step that it alone knows: STOP is among the keys
    where its defaults are taken. sdxl_train.py looks at the towers' rates only where they train.
    """
    names = ["learning_rate_te"] if count == 1 else ["learning_rate_te1", "learning_rate_te2"]
    said, stop = given.get("train_text_encoder"), given.get(STOP)
    key = next((name for name in names if given.get(name) is not None), names[0])
    trains = count == 1 and given.get(key) is not None
    if said is not None:
        key, trains = "train_text_encoder", said not in OFF
    elif stop is not None and count == 1:
        key, trains = STOP, int(stop) > 0
    elif not trains and STOP in given and count == 1 and all(given.get(each) in OFF for each in OTHER_SCRIPTS):
        key, trains = STOP, True
    rates = [_rate(given.get(name), given.get("learning_rate")) if trains else 0.0 for name in names]
    return key, {key, *names}, rates
