"""The data of other trainers: their datasets become one source, or a mixture in which each comes as often as there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.recipes.recipe import ADDED, Kind, Recipe
from cascade_train.config.recipes.table import apply, row_of

SOURCE, REPEATS, WEIGHT, PREFIX, SUFFIX = ".data", ".repeats", ".loss_weight", ".prefix", ".suffix"
"""What an entry of a table's `data` may come to beside keys of a source: its option, how often it comes in an epoch,
the weight of its loss, and what stands before and behind its captions."""

UNNAMED = "pictures"
"""The source of a file that describes one dataset."""

Dataset = Mapping[str, Any]
Part = dict[str, tuple[Any, tuple[str, ...]]]
"""A source: our key, which begins with a dot -> its value, and the trainer's keys that it comes from."""


def take_datasets(
    recipe: Recipe,
    inherited: Dataset,
    datasets: Sequence[tuple[str, Dataset]],
    table: Mapping[str, Any],
    source: Path,
) -> None:
    """Make the data of a recipe: `datasets` by their names, each with what it inherits where it says nothing else."""
    parts = []
    for name, own in datasets:
        parts.append((name, _part(recipe, name if len(datasets) > 1 else "", inherited, own, table, source)))
    counted = any(part.get(key, (1, ""))[0] != 1 for _, part in parts for key in (REPEATS, WEIGHT))
    if len(parts) > 1 or counted:
        recipe.groups["data"] = "mixture"
    for name, part in [(name or UNNAMED, part) for name, part in parts]:
        alone = recipe.groups.get("data") != "mixture"
        group, place = ("data", "data") if alone else (f"{ADDED}data@data.sources.{name}", f"data.sources.{name}")
        recipe.groups.setdefault(group, "folder")
        for key, (value, told) in part.items():
            if key not in (REPEATS, WEIGHT):
                ours = group if key == SOURCE else f"{place}{key}"
                recipe.put({*recipe.origins.get(ours, ()), *told}, {ours: value})
            elif value == 1:
                recipe.note(told[0], "1 is what happens here", Kind.SAME)
    for key, ours in ((REPEATS, "data.repeats"), (WEIGHT, "data.loss_weights")):
        numbers = {name or UNNAMED: part[key] for name, part in parts if part.get(key, (1, ""))[0] != 1}
        if numbers:
            recipe.put(
                [told[0] for _, told in numbers.values()], {ours: {n: value for n, (value, _) in numbers.items()}}
            )


def names(texts: Sequence[str]) -> list[str]:
    """Return names for sources, as keys can be, from names, ids or folders; all different."""
    found: list[str] = []
    for number, text in enumerate(texts):
        stem = re.sub(r"[^a-z0-9]+", "_", re.split(r"[\\/]", text.rstrip("\\/"))[-1].lower()).lstrip("0123456789_")
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


def _part(recipe: Recipe, name: str, inherited: Dataset, own: Dataset, table: Mapping[str, Any], source: Path) -> Part:
    """Translate a dataset into a source; settings that no source has go into the recipe."""
    part: Part = {}
    given = {**inherited, **own}
    for key in given:
        told = f"{name}: {key}" if name and key in own else key
        row = row_of(table["data"], key)
        if row is None:
            recipe.note(told, f"it is not in the table of {table['title']}", Kind.UNKNOWN)
            continue
        trial = Recipe(groups={"model": recipe.groups["model"]})
        apply(trial, key, table["data"][row], given, source, told=told)
        assigned = trial.taken().get(told, {})
        shared = {ours: value for ours, value in assigned.items() if not ours.startswith(".")}
        every = recipe.groups | recipe.values
        differing = [f"{ours}={every[ours]}" for ours, value in shared.items() if every.get(ours, value) != value]
        if differing and name:
            why = f"{', '.join(differing)} of another dataset goes for all: it has one value here"
            recipe.note(told, why, Kind.MISSING)
            continue
        for ours, value in shared.items():
            recipe.put({*recipe.origins.get(ours, ()), told}, {ours: value})
        if not shared:
            recipe.fates |= trial.fates
        for ours in assigned.keys() - shared.keys():
            for other in part.pop(ours, (None, ()))[1]:
                recipe.note(other, f"{told} goes before it", Kind.UNNEEDED)
            part[ours] = (assigned[ours], (told,))
    return _tidied(recipe, part)


def _tidied(recipe: Recipe, part: Part) -> Part:
    """Return a source without tags that nothing moves or drops, and with its prefix and suffix as a template."""
    tags = {key: told for key, (_, told) in part.items() if key.startswith(".captions.tags.")}
    if not any(part.get(f".captions.tags.{key}", (False, ""))[0] for key in ("shuffle", "drop_prob")):
        for key, told in tags.items():
            del part[key]
            recipe.note(told[0], "no tags are shuffled or dropped", Kind.SAME)
    elif ".captions.tags.separator" not in part:
        part[".captions.tags.separator"] = (",", next(iter(tags.values())))
    texts: list[tuple[Any, tuple[str, ...]]] = [part.pop(key, ("", ())) for key in (PREFIX, SUFFIX)]
    before, behind = (str(text).replace("{", "{{").replace("}", "}}") for text, _ in texts)
    if before or behind:
        part.setdefault(".captions.template", (f"{before}{{caption}}{behind}", (*texts[0][1], *texts[1][1])))
    return part
