"""Text towers that other trainers train beside Stable Diffusion's network, and the layers that count or get adapters.

Of the cascade they are left to the user, by the tables. Must not live here: all other keys (systems.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.config.recipes.table import OFF
from cascade_train.errors import ConfigError

Rates = list[float | None]
"""Of each text tower: its learning rate; 0 = it is frozen, None = the network's."""

FIRST, SECOND = "model.text_encoder", "model.text_encoder_2"
ADAPTED = {"kohya": [".self_attn", ".mlp"], "onetrainer": [".self_attn", ".mlp"], "simpletuner": [".self_attn"]}
"""Layers of a text tower that each trainer's adapters go to."""

STOP = "stop_text_encoder_training"
"""The step of sd-scripts' train_db.py from which the text tower is frozen; 0 or less = from the beginning."""

CLIP_EMBEDDERS = ("FrozenCLIPEmbedder", "FrozenOpenCLIPEmbedder2")
"""MindONE's classes of SDXL's two text towers."""


def take_towers(recipe: Recipe, system: str, given: Mapping[str, Any], *, said: Set[str], fills: bool) -> None:
    """Let the text towers train that a trainer's file trains, at its rates.

    `said`: the keys that the file has itself; `fills`: also what its trainer trains where the file says nothing.
    """
    if not recipe.timesteps or system not in TOWERS:
        return
    towers = [FIRST, SECOND] if recipe.groups["model"].startswith("sdxl") else [FIRST]
    is_lora = recipe.groups["task"] == "lora"
    for key, (tower, layer) in _hidden_layers(system, given, towers).items():
        recipe.put(key, {f"{tower}.hidden_layer": layer})
    if is_lora and system == "kohya":
        recipe.put("network_module", {"task.module_filters": [".attentions."]})
    key, rates = _rates(system, given, said, len(towers), is_lora)
    trained = {tower: rate for tower, rate in zip(towers, rates, strict=True) if rate != 0}
    spoken = sorted((SPOKEN.get(system, set()) | {key}) & said)
    never = DEAF.get((system, "adapters" if is_lora and system == "kohya" else towers[-1]), set())
    deaf = [name for name in spoken if not trained or name in never or (given[name] in OFF and name != key)]
    if trained and is_lora and system not in ADAPTED:
        recipe.note(key, "adapters of text towers: task.text_encoder_filters=[.self_attn]")
    elif trained and is_lora and len(trained) < len(towers):
        for name in {key, *spoken}:
            recipe.note(name, "adapters go into both text towers, or none: task.text_encoder_filters", Kind.MISSING)
    elif trained:
        adapted = {"task.text_encoder_filters": ADAPTED[system]} if is_lora else {}
        heard = [name for name in spoken if name not in deaf]
        _put(recipe, key, heard, adapted or {f"{tower}.train": True for tower in trained}, trained)
        recipe.implied |= {key} - said
    for name in [name for name in deaf if name not in recipe.taken()]:
        unset = trained and given[name] is None and name not in never
        recipe.note(name, "nothing is set" if unset else "no text tower trains by it", Kind.SAME)


def _rates(system: str, given: Mapping[str, Any], said: Set[str], count: int, is_lora: bool) -> tuple[str, Rates]:
    """Return the key by which towers train, and their rates; a ConfigError names the keys of a value that is none."""
    try:
        return TOWERS[system](given, count, is_lora)
    except (TypeError, ValueError) as error:
        named = ", ".join(sorted(SPOKEN.get(system, set()) & said))
        raise ConfigError(f"{named}: of another type than its trainer reads: {error}. Mend it in the file.") from error


def _put(
    recipe: Recipe, key: str, spoken: list[str], ours: dict[str, Any], trained: Mapping[str, float | None]
) -> None:
    """Take over what the keys of a trainer's that speak of text towers come to together."""
    own = {tower: rate for tower, rate in trained.items() if rate not in (None, recipe.values.get("optimizer.lr"))}
    recipe.put({key, *spoken}, ours | {f"{tower}.lr": rate for tower, rate in own.items()})
    if key == STOP:
        recipe.remarks.append("The file stops the text encoder at a step, and here it trains to the end.")


def _hidden_layers(system: str, given: Mapping[str, Any], towers: list[str]) -> dict[str, tuple[str, int]]:
    """Return tower and layer whose output is the text, counted from the end, by the trainer's key for it."""
    if system in ("kohya", "everydream"):
        skip = given.get("clip_skip")  # counts the last layer; of SDXL, sd-scripts passes over it
        return {"clip_skip": (FIRST, -max(1, int(skip)))} if skip is not None and len(towers) == 1 else {}
    if system != "onetrainer":
        return {}
    keys = {f"{tower.removeprefix('model.')}_layer_skip": tower for tower in towers}
    return {key: (tower, -len(towers) - int(given[key])) for key, tower in keys.items() if given.get(key) is not None}


def _rate(value: Any, default: float | None = None) -> float | None:
    if isinstance(value, bool):
        raise TypeError(f"{value} is no learning rate")
    return default if value is None else float(value)


def _kohya(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    """Adapters go to text towers too unless the file says no; whole towers train where it says so.

    train_db.py trains the tower of 1.x and 2.x by itself, up to a step that it alone knows. sdxl_train.py looks at the
    towers' rates only where they train.
    """
    own = given.get("learning_rate")
    if is_lora:
        rates = given.get("text_encoder_lr")
        rates = None if rates == [] else rates
        listed = rates if isinstance(rates, list) else [rates]
        frozen = given.get("network_train_unet_only", rates is None) or given.get("cache_text_encoder_outputs")
        some = [_rate(each, own) for each in (listed * count)[:count]]
        return "text_encoder_lr" if rates is not None else "network_train_unet_only", [0.0] * count if frozen else some
    names = ["learning_rate_te"] if count == 1 else ["learning_rate_te1", "learning_rate_te2"]
    said, stop = given.get("train_text_encoder"), given.get(STOP)
    key = next((name for name in names if given.get(name) is not None), names[0])
    trains = count == 1 and given.get(key) is not None
    if said is not None:
        key, trains = "train_text_encoder", said not in OFF
    elif stop is not None and count == 1:
        key, trains = STOP, int(stop) > 0
    return key, [_rate(given.get(name), own) if trains else 0.0 for name in names]


def _everydream(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    """The text tower trains, unless the file says no."""
    rate = _rate(given.get("optimizer.text_encoder_overrides.lr"))
    return "disable_textenc_training", [0.0 if given.get("disable_textenc_training", True) else rate] * count


def _everydream1(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    key = "model.params.cond_stage_trainable"
    return key, [None if given.get(key) not in OFF else 0.0] * count


def _mindone(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    key = "model.params.conditioner_config.params.emb_models"
    listed = [each for each in given.get(key) or [] if isinstance(each, dict)]
    trained = {str(each.get("target", "")).rpartition(".")[2] for each in listed if each.get("is_trainable")}
    return key, [None if kind in trained else 0.0 for kind in CLIP_EMBEDDERS[:count]]


def _onetrainer(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    parts = ["text_encoder", "text_encoder_2"][:count]
    own = given.get("learning_rate")
    rates = [
        _rate(given.get(f"{part}.learning_rate"), own) if given.get(f"{part}.train") not in OFF else 0.0
        for part in parts
    ]
    trained = (part for part, rate in zip(parts, rates, strict=True) if rate != 0)
    return f"{next(trained, parts[0])}.train", rates


def _simpletuner(given: Mapping[str, Any], count: int, is_lora: bool) -> tuple[str, Rates]:
    trains = given.get("train_text_encoder") not in OFF
    return "train_text_encoder", [_rate(given.get("text_encoder_lr")) if trains else 0.0] * count


TOWERS = {"kohya": _kohya, "everydream": _everydream, "everydream1": _everydream1, "mindone": _mindone,
          "onetrainer": _onetrainer, "simpletuner": _simpletuner}  # fmt: skip
RATES = ("text_encoder_lr", "learning_rate_te", "learning_rate_te1", "learning_rate_te2")
SPOKEN: dict[str, set[str]] = {
    "kohya": {"network_train_unet_only", *RATES},
    "everydream": {"optimizer.text_encoder_overrides.lr"},
    "onetrainer": {f"text_encoder{n}.{key}" for n in ("", "_2") for key in ("train", "learning_rate")},
    "simpletuner": {"text_encoder_lr"},
}
"""By system: which towers its file trains and by which key, and the other keys that say so."""

DEAF: dict[tuple[str, str], set[str]] = {
    ("kohya", "adapters"): {*RATES[1:]},
    ("kohya", FIRST): {"network_train_unet_only", "text_encoder_lr", "learning_rate_te1", "learning_rate_te2"},
    ("kohya", SECOND): {"network_train_unet_only", "text_encoder_lr", "learning_rate_te"},
    ("onetrainer", FIRST): {"text_encoder_2.train", "text_encoder_2.learning_rate"},
}
"""Of the keys in SPOKEN those that a trainer does not look at: for adapters, or by the last tower of the model."""
