"""What the keys of other trainers mean here: the tables beside this file, and how one row of them is applied.

A table's `keys` and `data` (the keys of one of its datasets) map keys, or `prefix*`, to a row. Of two rows that set the
same key of ours, the later goes before the earlier.

    learning_rate: optimizer.lr                       the same value; betas.0 is the first of a list
    lr_scheduler: {to: lr_scheduler, values: {...}}   the value of a key or the option of a group, by theirs
    min_timestep: {to: ..., as: thousandth}           converted by the name in CONVERSIONS, before `values`
    sample_steps: {to: ..., per: grad_accum}          over the value of another key; `over` is not rounded
    output_dir: {to: run.dir, below: output_name}     with the value of another key behind it
    snr_gamma: {to: ..., also: {objective: min_snr}}  and more is set
    seed: {to: run.seed, left: {-1: why}}             this value is left to the user
    loss_type: {same: [l2], missing: why}             this value is what happens here anyway
    clip_skip: {sd: {...}, missing: why}              another row for models with Stable Diffusion's timesteps
    transformer_depth: {of: sdxl, to: ..., missing}   of this model alone
    cache_latents: {unneeded: why}; or missing, yours
    ema_decay: {..., when: {use_ema: true}}           without which it does nothing; see `fits`
    train_text_encoder: {read: words}                 code makes of it what the words say

A key of ours that begins with a dot belongs to the source that a dataset becomes. `choices` say by which keys a file
chooses a model and a task, `defaults` what its trainer takes where a file says nothing, by its keys or by ours.
`family`: the keys that name a model, which may be none here. `typed`: the key of flags as they are typed.
`percent`: the names of keys that are percentages in presets of a GUI. `schedule_free`: optimizers without a schedule.
`notes`: by a name, `when` keys mean together what no row says, and what is left to the user then.
`towers`: the keys by which text towers train (`frozen`: do not train), those of their rates, and of the default rate
(`own`), and the layers that get adapters.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cascade_train.config.recipes.reading import read_linked, scalar
from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.errors import ConfigError

SYSTEMS = ("official", "open_diffusion", "everydream1", "mindone", "onetrainer", "simpletuner", "everydream", "kohya")
"""The trainers' tables, in the order in which a file is recognised."""
OFF: tuple[Any, ...] = (None, "", False, 0, 0.0, "none", "None", [], {})
"""Values by which other trainers switch a thing off."""
MAX_SIDE = 1_000_000
"""Pixels, more than any picture has."""

Values = Mapping[str, Any]


class LeftError(Exception):
    """A value that is left to the user, with the reason."""


@functools.cache
def load_table(trainer: str) -> dict[str, Any]:
    """Return what the keys of a trainer mean, from its YAML beside this file."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{trainer}.yaml").read_text(encoding="utf-8"))
    for section in ("keys", "data"):
        rows = table.get(section, {})
        table[section] = {key: row for keys, row in rows.items() for key in re.split(r",\s+", keys)}
    return table


def take(recipe: Recipe, given: Values, table: Values, source: Path) -> None:
    """Apply a table to every key of a trainer's configuration, and note what became of it."""
    order = {key: number for number, key in enumerate(table["keys"])}
    found = {key: row_of(table["keys"], key) for key in given}
    for key in sorted(found, key=lambda key: (key not in recipe.implied, order.get(found[key] or "", 0))):
        if found[key] is None:
            recipe.note(key, f"it is not in the table of {table['title']}", Kind.UNKNOWN)
        else:
            apply(recipe, key, table["keys"][found[key]], given, source)


def row_of(rows: Values, key: str) -> str | None:
    """Return the name of a key's row, or of the longest `prefix*` that it begins with; None where there is none."""
    prefixes = [each for each in rows if each.endswith("*") and key.startswith(each[:-1])]
    return key if key in rows else max(prefixes, key=len, default=None)


def fits(given: Values, wanted: Values) -> bool:
    """Return whether values are as wanted: true = on, false = there and off, a text = a pattern of the whole."""

    def fit(value: Any, want: Any) -> bool:
        if isinstance(want, bool):
            return value is not None and (value not in OFF) == want
        return re.fullmatch(str(want).lower(), "" if value is None else word(value), re.DOTALL) is not None

    return all(fit(given.get(key), want) for key, want in wanted.items())


def chosen(given: Values, options: Mapping[str, Sequence[Values]]) -> list[str]:
    """Return the options of which one of the conditions fits."""
    return [option for option, conditions in options.items() if any(fits(given, each) for each in conditions)]


def apply(recipe: Recipe, key: str, row: Any, given: Values, source: Path, *, told: str = "") -> None:
    """Apply a row to the value of a key, and note what became of it, by the name `told`."""
    row, value, told = _fitting(row, recipe), given[key], told or key
    kind = next((each for each in (Kind.UNNEEDED, Kind.MISSING, Kind.YOURS) if each.name.lower() in row), Kind.MISSING)
    why = row.get(kind.name.lower(), "")
    same = row.get("same", [])
    if value is None:
        recipe.note(told, "it is not set", Kind.SAME)
    elif not fits(given, row.get("when", {})):
        needed = f"it belongs to {', '.join(row['when'])}, which is off or otherwise"
        is_yours = kind is Kind.YOURS
        recipe.note(told, why if is_yours else needed, kind if is_yours else Kind.SAME)
    elif word(value) in map(word, same if isinstance(same, list) else [same]):
        recipe.note(told, f"{value} is what happens here", Kind.SAME)
    elif row.keys() & {"to", "values", "also", "left"}:
        try:
            assigned = meant(key, row, given, source)
        except LeftError as error:
            recipe.note(told, str(error))
            return
        if assigned:
            recipe.put(told, assigned)
        elif assigned is None:
            recipe.note(told, why or f"{value} has no equivalent", kind)
        else:
            recipe.note(told, f"{value} is what happens here", Kind.SAME)
    elif kind is not Kind.UNNEEDED and value in OFF and "same" not in row:
        recipe.note(told, "it is off there, as here", Kind.SAME)
    elif why:
        recipe.note(told, why, kind)


def _fitting(row: Any, recipe: Recipe) -> dict[str, Any]:
    """Return a row as a mapping, of those for other models the one for this."""
    row = {"to": row} if isinstance(row, str) else row
    if "sd" in row and recipe.timesteps:
        return _fitting(row["sd"], recipe)
    if row.get("of", recipe.groups["model"]) != recipe.groups["model"]:
        return {"unneeded": row["missing"]}
    return dict(row)


def meant(key: str, row: Values, given: Values, source: Path) -> dict[str, Any] | None:
    """Return the values of ours that a value means, by key; None where it has no equivalent.

    Raises a LeftError for a value that is left to the user, and a ConfigError for one of another type.
    """
    value = given[key]
    try:
        if "as" in row:
            value = (CONVERSIONS | {"prompts": partial(_prompts, source=source)})[row["as"]](value)
        value = max(1, int(value / whole(given, row["per"]))) if "per" in row and value is not None else value
        value = float(value) / float(given[row["over"]]) if "over" in row else value
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{key}={value!r} is of another type than its trainer reads: {error}.") from error
    if "below" in row and given.get(row["below"]) not in OFF:
        value = f"{str(value).rstrip('/')}/{given[row['below']]}"
    reasons, options = ({word(each): row[name][each] for each in row.get(name, {})} for name in ("left", "values"))
    if word(value) in reasons:
        raise LeftError(reasons[word(value)])
    if "values" in row:
        if word(value) not in options:
            return None
        value = options[word(value)]
        if value is None or isinstance(value, dict):
            return dict(value or {})
    names = row.get("to", [])
    return {**row.get("also", {}), **dict.fromkeys([names] if isinstance(names, str) else names, value)}


def whole(given: Values, key: str) -> int:
    """Return a whole number, 1 where none is given; a ConfigError names any other value."""
    value = given.get(key)
    value = 1 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number, 1 or more: it counts. Mend it in the file.")
    return int(value)


def word(value: Any) -> str:
    """Return a value as tables compare it."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return str(value).strip().lower()


def side(value: Any) -> int:
    """Return the side in pixels of a square as large as 768, "1024x1024", [512, 512] or, rounded to 32, "512,768"."""
    sides = [float(part) for part in re.split(r"[,x]", str(value).strip("[] "))]
    if not 1 <= len(sides) <= 2 or not all(1 <= each < MAX_SIDE and each.is_integer() for each in sides):
        raise ValueError("one or two sides in pixels")
    return int(sides[0]) if sides[0] == sides[-1] else 32 * max(1, round(math.sqrt(sides[0] * sides[1]) / 32))


def _one_side(value: Any) -> int:
    """Return the side of a square as large as the one size of a list, such as "768" or "512x768"."""
    sizes = {part.strip() for part in str(value).split(",")}
    if len(sizes) > 1:
        raise LeftError(f"{value} are several sizes that train side by side: model.image_size= takes one")
    return side(sizes.pop())


def _shapes(value: Any) -> Any:
    """Return sizes [height, width] as width over height; true as all shapes that have a name, false as none."""
    if isinstance(value, list):
        return [f"{int(width)}/{int(height)}" for height, width in value]
    return "wide" if value else None


def without_switches(text: Any) -> list[str]:
    """Return the prompts of a text, or of its lines, without comments and options such as --w 512."""
    lines = text if isinstance(text, list) else str(text).splitlines()
    found = [re.split(r"\s--[a-z]", str(line))[0].strip() for line in lines]
    return [line for line in found if line and not line.startswith("#")]


def _prompts(value: Any, source: Path) -> list[str]:
    """Return the prompts of a text file, or of several words that are none's name."""
    if " " in str(value) and not str(value).endswith((".txt", ".json", ".toml")):
        return without_switches(value)
    try:
        path, content = read_linked(str(value), source)
        if path.suffix != ".txt":
            raise ValueError(f"of {path.suffix[1:]} they are not read")
        if not (prompts := without_switches(content.decode("utf-8-sig"))):
            raise ValueError(f"{value} has none")
        return prompts
    except ValueError as error:
        raise LeftError(f"sample.prompts=[...] takes the prompts themselves: {error}") from error


def _steps(value: Any, ours: str = "warmup_steps", share: float = 0.0) -> float:
    """Return the steps of a warmup or a decay; 1 = none. Below 1, and where it is `share`, it is a part of a run."""
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, int | float | None):
        raise TypeError(f"the {ours.partition('_')[0]} must be a number of steps")
    if value and (value < 1 or value == share):
        raise LeftError(f"{value} of the steps: lr_scheduler.{ours}= counts them")
    return value or 1


def _crop(transforms: Any) -> str:
    """Return which part of a picture the last of MindONE's transforms that crops takes."""
    names = " ".join(str(each.get("target")) for each in transforms)
    if "Crop" not in names:
        raise LeftError("no crop is among them: data.crop=center, random or saliency")
    return "center" if "CenterCrop" in names else "random"


def _numbers(value: Any) -> list[Any]:
    return [scalar(each) for each in str(value).strip("()[] ").split(",")]


def _at_least(value: Any) -> dict[str, str]:
    if not float(value).is_integer():
        raise LeftError("an area in millions of pixels: data.size_filters={short_side: '>= <pixels>'}")
    return {"short_side": f">= {int(value)}"}


def _count(value: Any) -> int:
    if float(value) < 1 or int(value) != float(value):
        raise LeftError("parts of an epoch are no cadence: validate.every_steps=")
    return int(value)


def _prompt(samples: Any) -> list[str]:
    found = [each["prompt"] for each in samples if each.get("enabled", True) and each.get("prompt")]
    if not found:
        raise LeftError("none is enabled: sample.prompts=[...]")
    return found


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "side": side,
    "one_side": _one_side,
    "shapes": _shapes,
    "thousandth": lambda value: float(value) / 1000,
    "one_more": lambda value: value + 1,
    "samples": _prompt,
    "crop": _crop,
    "count": _count,
    "warmup": _steps,
    "warmup_or_all": partial(_steps, share=1),
    "decay": partial(_steps, ours="decay_steps"),
    "number": float,
    "numbers": _numbers,
    "whole": round,
    "last": lambda value: str(value).rpartition(".")[2],
    "list": lambda value: [str(value)],
    "parts": lambda value: [part.strip() for part in str(value).split(",") if part.strip()] or None,
    "template": lambda value: str(value).replace("{", "{{").replace("}", "}}"),
    "or_off": lambda value: value or None,
    "one_or_more": lambda value: _numbers(value) if "," in str(value) else value,
    "at_least": _at_least,
    "at_least_0": lambda value: max(0.0, value),
}
"""Conversions by their names in tables, beside `prompts`, which a file beside the one that is read may hold."""


def pairs(value: Any) -> dict[str, Any]:
    """Return texts `name=value`, or one text of them, by name."""
    texts = shlex.split(value.replace(", ", " ")) if isinstance(value, str) else value
    return {name: scalar(given) for name, _, given in (str(each).partition("=") for each in texts or []) if name}
