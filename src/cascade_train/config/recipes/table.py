"""What the keys of other trainers mean here: the tables beside this file, and how one entry of them is applied.

A table's `keys` and `data` (the keys of one of its datasets) map a key, or `prefix*`, to an entry:

    learning_rate: optimizer.lr                       the same value
    lr_scheduler: {to: lr_scheduler, values: {...}}   the value of a key or the option of a group, by theirs
    min_timestep: {to: ..., as: thousandth}           converted by the name in CONVERSIONS
    snr_gamma: {to: ..., also: {objective: min_snr}}  and more is set
    loss_type: {same: [l2], missing: why}             this value is what happens here anyway
    zero_terminal_snr: {ddpm: objective..., missing}  of models with Stable Diffusion's timesteps alone
    transformer_depth: {of: sdxl, to: ..., missing}   of this model alone
    cache_latents: {unneeded: why}; or missing, yours
    multires_noise_discount: {..., needs: another}    belongs to another key, without which it does nothing
    train_batch_size: {read: words}                   code makes of it what the words say

A key of ours that begins with a dot belongs to the source that a dataset becomes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.errors import ConfigError

SYSTEMS = ("everydream", "everydream1", "kohya", "mindone", "official", "onetrainer", "open_diffusion", "simpletuner")
"""The trainers whose files are read, by their tables."""

OFF: tuple[Any, ...] = (None, "", False, 0, 0.0, "none", "None", [], {})
"""Values by which other trainers switch a thing off."""


@functools.cache
def load_table(trainer: str) -> dict[str, Any]:
    """Return what the keys of a trainer mean, from its YAML beside this file."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{trainer}.yaml").read_text(encoding="utf-8"))
    return table


def take(recipe: Recipe, given: Mapping[str, Any], table: Mapping[str, Any], *, section: str = "keys") -> None:
    """Apply a table to every key of a trainer's configuration, and say what became of it."""
    for key, value in given.items():
        entry = entry_of(table[section], key)
        if isinstance(entry, dict) and "ddpm" in entry and recipe.timesteps:
            entry = {"to": entry["ddpm"]}
        if isinstance(entry, dict) and entry.get("of", recipe.groups.get("model")) != recipe.groups.get("model"):
            recipe.note(key, entry["missing"], Kind.UNNEEDED)
        elif entry is None:
            recipe.note(key, f"it is not in the table of {table['title']}", Kind.UNKNOWN)
        elif value is None:
            recipe.note(key, "it is not set", Kind.SAME)
        elif isinstance(entry, dict) and "needs" in entry and given.get(entry["needs"]) in OFF:
            recipe.note(key, f"it belongs to {entry['needs']}, which is off", Kind.SAME)
        else:
            apply(recipe, key, entry, value)


def entry_of(entries: Mapping[str, Any], key: str) -> Any:
    """Return the entry of a key, or of the longest `prefix*` that it begins with; None where there is none."""
    if key in entries:
        return entries[key]
    prefixes = [each for each in entries if each.endswith("*") and key.startswith(each[:-1])]
    return entries[max(prefixes, key=len)] if prefixes else None


def apply(recipe: Recipe, key: str, entry: Any, value: Any) -> None:
    """Apply one entry to a value, and say what became of it."""
    entry = {"to": entry} if isinstance(entry, str) else entry
    if _is(value, entry.get("same")):
        recipe.note(key, f"{value} is what happens here", Kind.SAME)
        return
    if "read" in entry:
        recipe.note(key, str(entry["read"]), Kind.TAKEN)
        return
    if "to" in entry or "values" in entry or "also" in entry:
        assigned = meant(key, entry, value)
        if assigned is None:
            recipe.note(key, entry.get("missing", f"{value} has no equivalent"), Kind.MISSING)
        elif not assigned:
            recipe.note(key, f"{value} is what happens here", Kind.SAME)
        else:
            recipe.put(key, assigned)
        return
    kind = next(kind for kind in ("unneeded", "missing", "yours") if kind in entry)
    if kind == "missing" and value in OFF and "same" not in entry:
        recipe.note(key, "it is off there, as here", Kind.SAME)
    else:
        recipe.note(key, entry[kind], Kind[kind.upper()])


def meant(key: str, entry: Mapping[str, Any], value: Any) -> dict[str, Any] | None:
    """Return what a value comes to, by our keys; None where it has no equivalent."""
    if "values" in entry:
        known = {_word(theirs): ours for theirs, ours in entry["values"].items()}
        if _word(value) not in known:
            return None
        value = known[_word(value)]
        if value is None or isinstance(value, dict):
            return dict(value or {})
    try:
        value = CONVERSIONS[entry["as"]](value) if "as" in entry else value
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key}={value!r} is of another type than its trainer reads: {error}.") from error
    return {**entry.get("also", {}), **({entry["to"]: value} if "to" in entry else {})}


def whole(given: Mapping[str, Any], key: str, default: int = 1) -> int:
    """Return a value that counts; a ConfigError that names it where it does not."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number, 1 or more: it counts. Mend it in the file.")
    return int(value)


def _word(value: Any) -> str:
    return str(value).strip().lower()


def _is(value: Any, same: Any) -> bool:
    return same is not None and _word(value) in {_word(each) for each in (same if isinstance(same, list) else [same])}


def side(value: Any) -> int:
    """Return the side in pixels of a square as large as 768, "1024x1024", [512, 512] or, rounded to 32, "512,768"."""
    sides = [int(part) for part in re.split(r"[,x]", str(value).strip("[] "))]
    if not 1 <= len(sides) <= 2 or min(sides) < 1:
        raise ValueError("one or two sides in pixels")
    return sides[0] if sides[0] == sides[-1] else 32 * max(1, round(math.sqrt(sides[0] * sides[1]) / 32))


def shapes(value: Any) -> Any:
    """Return sizes [height, width] as width over height; true as all shapes that have a name, false as none."""
    if isinstance(value, list):
        return [f"{int(width)}/{int(height)}" for height, width in value]
    return "wide" if value else None


def without_switches(text: Any) -> list[str]:
    """Return the prompts of a text, or of its lines, without comments and options such as --w 512."""
    lines = text if isinstance(text, list) else str(text).splitlines()
    found = [re.split(r"\s--[a-z]", str(line))[0].strip() for line in lines]
    return [line for line in found if line and not line.startswith("#")]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "side": side,
    "shapes": shapes,
    "thousandth": lambda value: float(value) / 1000,
    "one_more": lambda value: value + 1,
    "upscale": lambda value: 1.0 + float(value),
    "prompts": without_switches,
    "whole": round,
    "list": lambda value: [str(value)],
    "or_off": lambda value: value or None,
    "with_space": lambda value: f"{value} ",
    "space_with": lambda value: f" {value}",
    "at_least": lambda value: {"short_side": f">= {int(value)}"},
}
"""Conversions of values, by the name that a table gives."""
