"""Other trainers' files laid out flat, with the files that they name, and their datasets as sources of ours.

Datasets become one source, or a mixture in which each comes as often as there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from cascade_train.config.recipes.reading import flat, list_folder, parsed, read_flags, read_linked, scalar
from cascade_train.config.recipes.recipe import ADDED, Kind, Recipe
from cascade_train.config.recipes.table import OFF, SYSTEMS, Values, apply, fits, load_table, pairs, row_of

TEXTS = ("run.name", "run.dir", "tracker.", "model.weights", "model.vae.weights", ".path", "sample.prompts",
         "sample.negative_prompt", ".captions.tags.separator", "data.urls", "data.path", "task.weights")  # fmt: skip
"""Where texts stay texts, though they spell a number."""

SOURCE, REPEATS, WEIGHT, PREFIX, SUFFIX = ".data", ".repeats", ".loss_weight", ".prefix", ".suffix"
"""What an entry of a table's `data` may set beside keys of a source: its option, how often it comes in an epoch, the
weight of its loss, and what stands before and behind its captions."""

REGULARISATION = (
    "its pictures come as often as all others together there: data.repeats=null data.shares={...}, half of it for these"
)
"""Of a subset of regularisation pictures of sd-scripts (library/train_util.py:2168)."""

GUI = {"max_resolution", "epoch", "LoRA_type", "lr_warmup"}
"""Keys that presets of kohya_ss have, and files of sd-scripts do not."""
IMAGE_SIZE = "model.image_size"

Dataset = tuple[str, dict[str, Any]]
"""A name, and the trainer's keys of a dataset."""
Part = dict[str, tuple[Any, tuple[str, ...]]]
"""A source: our key, which begins with a dot -> its value, and the trainer's keys that it comes from."""


@dataclass(kw_only=True)
class Given:
    """A trainer's configuration, its file, and the processes that it will run on."""

    system: str
    table: dict[str, Any]
    path: Path
    ranks: int
    fills: bool  # with what the trainer takes where the file says nothing
    keys: dict[str, Any] = field(default_factory=dict)  # dotted, with defaults
    datasets: list[Dataset] = field(default_factory=list)  # empty where the configuration itself describes one
    implied: set[str] = field(default_factory=set)  # keys that the file does not have
    open: set[str] = field(default_factory=set)  # keys whose interpolation leads to no value of the file
    ours: dict[str, Any] = field(default_factory=dict)  # defaults that no key of the trainer's names, by our keys
    notes: dict[str, tuple[Kind, str]] = field(default_factory=dict)  # of keys, files and datasets beside the table


def system_of(source: Any) -> str | None:
    """Return the trainer that a configuration is of, recognised by its keys; None = unknown."""
    found = source if isinstance(source, list) else [source, *source.values()]
    keys = {str(key).removeprefix("--") for each in found if isinstance(each, dict) for key in each}
    signs = {name: load_table(name)["signs"] for name in SYSTEMS}
    return next((name for name, sets in signs.items() if any(keys >= set(each.split()) for each in sets)), None)


def lay_out(system: str, source: Any, path: Path, *, flags: Values, ranks: int, fills: bool) -> Given:
    """Lay a file out flat, with the files that it names below their places, and what is given behind the script."""
    table = load_table(system)
    given = Given(system=system, table=table, path=path, ranks=ranks, fills=fills)
    source = {table["datasets"]["from"]: source} if isinstance(source, list) else source
    if system == "kohya":  # whose sections mean nothing
        sections = {key: value for key, value in source.items() if isinstance(value, dict) and key != "general"}
        source = {key: value for key, value in source.items() if key not in sections}
        source |= {key: value for section in sections.values() for key, value in section.items()}
    percent, renamed = table.get("percent", {}) if GUI & source.keys() else {}, table.get("renamed", {})
    nested = {percent.get(name := str(key).removeprefix("--"), name): value for key, value in source.items()}
    typed = str(nested.get(table.get("typed", "")) or "")
    flags = {**(read_flags(typed[typed.index("--") :]) if "--" in typed else {}), **flags}
    nested = {renamed.get(key, key): value for key, value in (nested | flags).items()}
    _follow(nested, given)
    paired = {name: pairs(nested.get(name)) or None for name in table.get("pairs", ())}
    nested = {key: value for key, value in (nested | paired).items() if value is not None or key not in paired}
    laid = {renamed.get(key, key): value for key, value in flat(nested)}
    given.keys = {key: _read(table, key, value) for key, value in laid.items()}
    given.open = {key for key, value in laid.items() if value == MISSING}
    if system == "kohya":
        _kohya(given)
    else:
        _listed(given)
    if fills:
        defaults = table.get("defaults", {})
        known = defaults.keys() & (table["keys"] | table["data"]).keys()
        given.implied = {key for key in known - given.open if given.keys.get(key) is None}
        given.keys |= {key: value for key, value in defaults.items() if key in given.implied}
        given.ours = {key: value for key, value in defaults.items() if key not in known}
    return given


def _read(table: Values, key: str, value: Any) -> Any:
    """Return a value as its trainer reads it: a text that spells a number is one, and an empty one is not set."""
    rows = table["keys"] | table["data"]
    row = rows.get(row_of(rows, key) or "", "")
    to = row if isinstance(row, str) else str(row.get("to", ""))
    return None if value in ("", MISSING) else value if to.startswith(TEXTS) else scalar(value)


def _follow(nested: dict[str, Any], given: Given) -> None:
    """Put the content of the files that a file names at their places."""
    for key, place in given.table.get("follows", {}).items():
        name = nested.get(key)
        if not isinstance(name, str) or not name or (place and nested.get(place)):
            continue
        try:
            found, content = read_linked(name, given.path)
        except ValueError as error:
            given.notes[key] = (
                Kind.YOURS,
                f"{name} is left: {str(error).rstrip('.')}. Put it beside the file, and import again",
            )
        else:
            inner = parsed(content, found)
            nested.update({place: inner} if place else inner)
            given.notes[key] = (Kind.UNNEEDED, f"its keys are those of {name}")


def _listed(given: Given) -> None:
    """Take the datasets of a list by their names, and note which are not trained on."""
    spec = given.table.get("datasets")
    if spec is None:
        return
    datasets = [dict(flat(each)) for each in given.keys.pop(spec["from"], None) or []]
    titles = names([next((str(each[key]) for key in spec["name"] if each.get(key)), "") for each in datasets])
    for title, each in zip(titles, datasets, strict=True):
        skip = next((skip for skip in spec["skip"] if fits(each, skip["when"])), None)
        if skip is None:
            given.datasets.append((title, {key: _read(given.table, key, value) for key, value in each.items()}))
        else:
            given.notes[title] = (Kind[skip["kind"].upper()], skip["why"])


def _kohya(given: Given) -> None:
    """Take the subsets of all datasets, of which one has the size, or the folders that are named as 10_cats."""
    keys = given.keys
    listed = keys.pop("datasets", None) or []
    general = {key.removeprefix("general."): keys.pop(key) for key in list(keys) if key.startswith("general.")}
    subsets = [{**general, **each, **own} for each in listed for own in each.get("subsets", [])]
    sizes = [str(each["batch_size"]) for each in subsets if "batch_size" in each]
    if len(set(sizes)) > 1:
        why = f"{', '.join(sizes)} of its datasets, and one here: train.micro_batch_size={sizes[-1]} goes for all"
        given.notes["batch_size of datasets"] = (Kind.MISSING, why)
    for subset in subsets:
        subset.pop("subsets", None)
        keys.update({"train_batch_size": subset["batch_size"]} if "batch_size" in subset else {})
        if len(set(sizes)) > 1:
            subset.pop("batch_size", None)
        if subset.pop("is_reg", False):
            subset["prior_loss_weight"] = keys.get("prior_loss_weight") or 1.0
            given.notes[f"is_reg of {subset.get('image_dir')}"] = (Kind.YOURS, REGULARISATION)
        keys.update({key: value for key, value in subset.items() if key == "metadata_file"})
    if any("prior_loss_weight" in subset for subset in subsets):
        keys.pop("prior_loss_weight", None)
    stems = [str(each.get("image_dir", "")) for each in subsets]
    folder = keys.get("train_data_dir")
    if not subsets and folder not in OFF:
        listed = list_folder(str(folder), given.path)
        if listed is None:
            why = "those named as 10_cats are not listed, as they are not beside the file: data.repeats="
            given.notes["folders of train_data_dir"] = (Kind.YOURS, why)
        inner = [(each, re.fullmatch(r"(\d+)_(.*)", each.name)) for each in listed or () if each.is_dir()]
        subsets = [
            {"image_dir": str(each), "num_repeats": int(match[1]), "class_tokens": match[2]}
            for each, match in inner
            if match is not None
        ]
        stems = [each["class_tokens"] for each in subsets]
        if subsets:
            del keys["train_data_dir"]
            given.notes["train_data_dir"] = (Kind.UNNEEDED, "a source for each of its folders that is named as 10_cats")
    given.datasets = list(zip(names(stems), subsets, strict=True))


def names(texts: Sequence[str]) -> list[str]:
    """Return names for sources, as keys can be, from names, ids or folders; all different."""
    found: list[str] = []
    for number, text in enumerate(texts):
        stem = re.sub(r"[^a-z0-9]+", "_", re.split(r"[\\/]", text.rstrip("\\/"))[-1].lower()).lstrip("0123456789_")
        name = stem.rstrip("_") or f"source_{number}"
        found.append(name if name not in found else f"{name}_{number}")
    return found


def take_datasets(recipe: Recipe, inherited: dict[str, Any], given: Given) -> None:
    """Make the data of a recipe: each dataset with what it inherits where it says nothing else."""
    datasets = given.datasets or [("pictures", {})]
    several = len(datasets) > 1
    if not several:
        recipe.implied -= datasets[0][1].keys()
    parts = {name: _part(recipe, name if several else "", inherited | own, own, given) for name, own in datasets}
    numbers = {
        key: {name: part[key] for name, part in parts.items() if part.get(key, (1, ""))[0] != 1}
        for key in (REPEATS, WEIGHT)
    }
    if several or any(numbers.values()):
        recipe.groups["data"] = "mixture"
    for name, part in parts.items():
        is_alone = recipe.groups.get("data") != "mixture"
        group, place = ("data", "data") if is_alone else (f"{ADDED}data@data.sources.{name}", f"data.sources.{name}")
        recipe.groups.setdefault(group, "folder")
        for key, (value, told) in part.items():
            if key not in numbers:
                ours = group if key == SOURCE else f"{place}{key}"
                recipe.put({*recipe.origins.get(ours, ()), *told}, {ours: value})
            elif value == 1:
                recipe.note(told[0], "1 is what happens here", Kind.SAME)
    for key, ours in ((REPEATS, "data.repeats"), (WEIGHT, "data.loss_weights")):
        if numbers[key]:
            values = {name: value for name, (value, _) in numbers[key].items()}
            recipe.put([told[0] for _, told in numbers[key].values()], {ours: values})


def _part(recipe: Recipe, name: str, values: Values, own: Values, given: Given) -> Part:
    """Translate a dataset into a source; settings that no source has go into the recipe."""
    part: Part = {}
    rows = given.table["data"]
    for key in values:
        told = f"{name}: {key}" if name and key in own else key
        row = row_of(rows, key)
        if row is None:
            recipe.note(told, f"it is not in the table of {given.table['title']}", Kind.UNKNOWN)
            continue
        trial = Recipe(groups={"model": recipe.groups["model"]})
        apply(trial, key, rows[row], values, given.path, told=told)
        assigned = trial.taken().get(told, {})
        if name and recipe.values.get(IMAGE_SIZE, size := assigned.get(IMAGE_SIZE)) != size and size is not None:
            assigned[".image_size"] = assigned.pop(IMAGE_SIZE)
        shared = {ours: value for ours, value in assigned.items() if not ours.startswith(".")}
        every = recipe.groups | recipe.values
        differing = [f"{ours}={every[ours]}" for ours, value in shared.items() if every.get(ours, value) != value]
        if differing and name:
            why = f"{', '.join(differing)} of another dataset goes for all: it has one value here"
            recipe.note(f"{name}: {key}", why, Kind.MISSING)
            continue
        for ours, value in shared.items():
            recipe.put({*recipe.origins.get(ours, ()), told}, {ours: value})
        if not shared:
            recipe.fates |= trial.fates
        for ours in sorted(assigned.keys() - shared.keys()):
            for other in part.pop(ours, (None, ()))[1]:
                recipe.note(other, f"{told} goes before it", Kind.UNNEEDED)
            part[ours] = (assigned[ours], (told,))
    _tidy(recipe, part)
    return part


def _tidy(recipe: Recipe, part: Part) -> None:
    """Leave out tags that nothing moves or drops, and make a template of prefix and suffix."""
    tags = {key: told for key, (_, told) in part.items() if key.startswith(".captions.tags.")}
    if not any(part.get(f".captions.tags.{key}", (False, ""))[0] for key in ("shuffle", "drop_prob")):
        for key, told in tags.items():
            del part[key]
            recipe.note(told[0], "no tags are shuffled or dropped", Kind.SAME)
    elif ".captions.tags.separator" not in part:
        part[".captions.tags.separator"] = (",", next(iter(tags.values())))
    texts: list[tuple[Any, tuple[str, ...]]] = [part.pop(key, ("", ())) for key in (PREFIX, SUFFIX)]
    before, behind = (str(text).replace("{", "{{").replace("}", "}}") for text, _ in texts)
    if told := (*texts[0][1], *texts[1][1]):
        part.setdefault(".captions.template", (f"{before} {{caption}} {behind}".strip(), told))
