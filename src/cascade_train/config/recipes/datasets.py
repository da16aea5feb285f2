"""The data of other trainers: their datasets become one source, or a mixture in which each comes as often as there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.recipes.recipe import ADDED, Kind, Recipe
from cascade_train.config.recipes.table import apply, entry_of

SOURCE, REPEATS, WEIGHT, PREFIX, SUFFIX = ".data", ".repeats", ".loss_weight", ".prefix", ".suffix"
"""What an entry of a table's `data` may come to beside keys of a source: its option, how often it comes in an epoch,
the weight of its loss, and what stands before and behind its captions."""

Dataset = Mapping[str, Any]
Part = dict[str, tuple[Any, str]]
"""A source: our key, which begins with a dot -> its value, and the trainer's key that it comes from."""


def take_datasets(
    recipe: Recipe, inherited: Dataset, datasets: Sequence[tuple[str, Dataset]], table: Mapping[str, Any]
) -> None:
    """Make the data of a recipe: `datasets` by their names, each with what it inherits where it says nothing else."""
    parts = [(name, _part(recipe, name if len(datasets) > 1 else "", inherited, own, table)) for name, own in datasets]
    counted = any(part.get(key, (1, ""))[0] != 1 for _, part in parts for key in (REPEATS, WEIGHT))
    if len(parts) < 2 and not counted:
        for told in [part[key][1] for _, part in parts for key in (REPEATS, WEIGHT) if key in part]:
            recipe.note(told, "1 is what happens here", Kind.SAME)
        _place(recipe, "data", "data", parts[0][1] if parts else {})
        return
    recipe.groups["data"] = "mixture"
    for name, part in parts:
        _place(recipe, f"{ADDED}data@data.sources.{name}", f"data.sources.{name}", part)
    for key, ours in ((REPEATS, "data.repeats"), (WEIGHT, "data.loss_weights")):
        for told in [part[key][1] for _, part in parts if part.get(key, (0, ""))[0] == 1]:
            recipe.note(told, "1 is what happens here", Kind.SAME)
        numbers = {name: part[key] for name, part in parts if part.get(key, (1, ""))[0] != 1}
        recipe.values |= {ours: {name: value for name, (value, _) in numbers.items()}} if numbers else {}
        for name, (value, told) in numbers.items():
            recipe.assigned.setdefault(told, {})[f"{ours}.{name}"] = value


def names(texts: Sequence[str]) -> list[str]:
    """Return names for sources, as keys can be, from names, ids or folders; all different."""
    found: list[str] = []
    for number, text in enumerate(texts):
        stem = re.sub(r"\W+", "_", re.split(r"[\\/]", text.rstrip("\\/"))[-1]).lower().lstrip("0123456789_")
        name = stem.rstrip("_") or f"source_{number}"
        found.append(name if name not in found else f"{name}_{number}")
    return found


def numbered_folders(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the subfolders of a folder that are named as 10_cats, each with its repeats; none where it is not here."""
    folder = Path(path)
    found = [each for each in sorted(folder.iterdir()) if each.is_dir()] if folder.is_dir() else []
    matched = [(each, re.fullmatch(r"(\d+)_(.*)", each.name)) for each in found]
    return [
        (match[2], {"image_dir": str(each), "num_repeats": int(match[1]), "class_tokens": match[2]})
        for each, match in matched
        if match is not None
    ]


def _part(recipe: Recipe, name: str, inherited: Dataset, own: Dataset, table: Mapping[str, Any]) -> Part:
    """Translate a dataset into a source; settings that no source has go into the recipe."""
    part: Part = {}
    for key, value in {**inherited, **own}.items():
        told = f"{name}: {key}" if name and key in own else key
        entry = entry_of(table["data"], key)
        if entry is None or value is None:
            why = f"it is not in the table of {table['title']}" if entry is None else "it is not set"
            recipe.note(told, why, Kind.UNKNOWN if entry is None else Kind.SAME)
            continue
        trial = Recipe()
        apply(trial, told, entry, value)
        assigned = trial.assigned.get(told, {})
        whole = {ours: v for ours, v in assigned.items() if not ours.startswith(".")}
        differing = [f"{ours}={recipe.values[ours]}" for ours, v in whole.items() if recipe.values.get(ours, v) != v]
        if differing:
            why = f"{', '.join(differing)} of another dataset goes for all: it has one value here"
            recipe.note(told, why, Kind.MISSING)
            continue
        recipe.put(told, whole)
        recipe.fates[told] = trial.fates[told]
        part |= {ours: (v, told) for ours, v in assigned.items() if ours.startswith(".")}
    return _tidied(recipe, part)


def _tidied(recipe: Recipe, part: Part) -> Part:
    """Return a source without tags that nothing moves or drops, and with its prefix and suffix as a template."""
    tags = {key: told for key, (_, told) in part.items() if key.startswith(".captions.tags.")}
    if not any(part.get(f".captions.tags.{key}", (False, ""))[0] for key in ("shuffle", "drop_prob")):
        for key, told in tags.items():
            del part[key]
            recipe.note(told, "no tags are shuffled or dropped", Kind.SAME)
    elif ".captions.tags.separator" not in part:
        part[".captions.tags.separator"] = (",", next(iter(tags.values())))
    texts = [part.pop(key, ("", "")) for key in (PREFIX, SUFFIX)]
    before, behind = (str(text).replace("{", "{{").replace("}", "}}") for text, _ in texts)
    if before or behind:
        part.setdefault(".captions.template", (f"{before}{{caption}}{behind}", texts[0][1] or texts[1][1]))
    return part


def _place(recipe: Recipe, group: str, place: str, part: Part) -> None:
    """Put a source at its place in the recipe."""
    recipe.groups[group] = part[SOURCE][0] if SOURCE in part else "folder"
    for key, (value, told) in part.items():
        ours = group if key == SOURCE else f"{place}{key}"
        if key not in (SOURCE, REPEATS, WEIGHT):
            recipe.values[ours] = value
            recipe.origins[ours] = told
        if key not in (REPEATS, WEIGHT):
            recipe.assigned.setdefault(told, {})[ours] = value
