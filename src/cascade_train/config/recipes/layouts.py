"""The files of other trainers laid out flat: their keys, those of their datasets, and what their trainers take besides.

A file is completed by those that it names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cascade_train.config.recipes.datasets import names, numbered_folders
from cascade_train.config.recipes.reading import flat, parsed, read_flags, read_linked, scalar
from cascade_train.config.recipes.recipe import Kind
from cascade_train.config.recipes.table import OFF, SYSTEMS, Values, fits, load_table, pairs, row_of

TEXTS = ("run.name", "run.dir", "tracker.", "model.weights", "model.vae.weights", ".path", "sample.prompts",
         "sample.negative_prompt", ".captions.tags.separator", "data.urls", "data.path", "task.weights")  # fmt: skip
"""Where texts stay texts, though they spell a number."""


@dataclass(kw_only=True)
class Given:
    """A trainer's configuration.

    Attributes:
        keys: its own, dotted, with those that it has by default.
        datasets: name -> keys of a dataset; empty where the configuration itself describes one.
        implied: keys that the file does not have.
        ours: what its trainer does that none of its keys says, by our keys.
        notes: what became of keys, files and datasets that are not taken over by the table.
    """

    keys: dict[str, Any]
    datasets: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    implied: set[str] = field(default_factory=set)
    ours: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, tuple[Kind, str]] = field(default_factory=dict)


def system_of(source: Any) -> str | None:
    """Return the trainer that a configuration is of, recognised by its keys; None = unknown."""
    found = source if isinstance(source, list) else [source, *source.values()]
    keys = {str(key).removeprefix("--") for each in found if isinstance(each, dict) for key in each}
    signs = {name: load_table(name)["signs"] for name in SYSTEMS}
    return next((name for name, sets in signs.items() if any(keys >= set(each.split()) for each in sets)), None)


def lay_out(system: str, source: Any, path: Path, *, flags: Values, fills: bool) -> Given:
    """Lay a file out flat, with the files that it names below their places, and what is given behind the script.

    `fills`: also what its trainer takes where the file says nothing.
    """
    table, given = load_table(system), Given(keys={})
    source = {table["datasets"]["from"]: source} if isinstance(source, list) else source
    if system == "kohya":  # whose sections mean nothing
        sections = {key: value for key, value in source.items() if isinstance(value, dict) and key != "general"}
        source = {k: v for k, v in source.items() if k not in sections} | {
            key: value for section in sections.values() for key, value in section.items()
        }
        flags = {**_typed(source.get("additional_parameters")), **flags}
    nested = {**{str(key).removeprefix("--"): value for key, value in source.items()}, **flags}
    _follow(nested, given, table, path)
    for name in table.get("pairs", ()):
        nested[name] = pairs(nested.get(name)) or None
    renamed = {table.get("renamed", {}).get(key, key): value for key, value in flat(nested)}
    bare = {name for name in table.get("pairs", ()) if renamed.get(name) is None}
    given.keys = {key: _read(table, key, value) for key, value in renamed.items() if key not in bare}
    (_kohya if system == "kohya" else _listed)(given, table)
    if fills:
        known = {key for key in table.get("defaults", {}) if row_of(table["keys"] | table["data"], key) is not None}
        silent = {key for key in known if given.keys.get(key) is None}
        given.implied, given.keys = silent, given.keys | {key: table["defaults"][key] for key in silent}
        given.ours = {key: value for key, value in table.get("defaults", {}).items() if key not in known}
    return given


def _typed(text: Any) -> dict[str, Any]:
    return read_flags(text) if isinstance(text, str) and text.strip().startswith("--") else {}


def _read(table: Values, key: str, value: Any) -> Any:
    """Return a value as its trainer reads it: a text that spells a number is one, and an empty one is not set."""
    rows = table["keys"] | table["data"]
    row = rows.get(row_of(rows, key) or "", "")
    to = row if isinstance(row, str) else str(row.get("to", ""))
    return None if value in ("", "???") else value if to.startswith(TEXTS) else scalar(value)


def _follow(nested: dict[str, Any], given: Given, table: Values, path: Path) -> None:
    """Put the content of the files that a file names at their places."""
    for key, place in table.get("follows", {}).items():
        name = nested.get(key)
        if not isinstance(name, str) or not name or (place and nested.get(place)):
            continue
        try:
            found, content = read_linked(name, path)
        except ValueError as error:
            given.notes[key] = (Kind.YOURS, f"{name} is left: {error}. Put it beside the file, and import again")
        else:
            inner = parsed(content, found)
            nested.update({place: inner} if place else inner)
            given.notes[key] = (Kind.UNNEEDED, f"its keys are those of {name}")


def _listed(given: Given, table: Values) -> None:
    """Take the datasets of a list by their names, and say which are not trained on."""
    spec = table.get("datasets")
    if spec is None:
        given.datasets = [("pictures", {})] if table.get("mixture") else []
        return
    datasets = [dict(flat(each)) for each in given.keys.pop(spec["from"], None) or []]
    titles = names([next((str(each[key]) for key in spec["name"] if each.get(key)), "") for each in datasets])
    for title, each in zip(titles, datasets, strict=True):
        skip = next((skip for skip in spec["skip"] if fits(each, skip["when"])), None)
        if skip is None:
            given.datasets.append((title, {key: _read(table, key, value) for key, value in each.items()}))
        else:
            given.notes[title] = (Kind[skip["kind"].upper()], skip["why"])


def _kohya(given: Given, table: Values) -> None:
    """Take the subsets of all datasets, of which one has the size, or the folders that are named as 10_cats."""
    keys = given.keys
    listed = keys.pop("datasets", None) or []
    general = {key.removeprefix("general."): keys.pop(key) for key in list(keys) if key.startswith("general.")}
    subsets = [{**general, **each, **own} for each in listed for own in each.get("subsets", [])]
    for subset in subsets:
        subset.pop("subsets", None)
        keys.update({"train_batch_size": subset["batch_size"]} if "batch_size" in subset else {})
        if subset.pop("is_reg", False):
            subset["prior_loss_weight"] = keys.get("prior_loss_weight") or 1.0
    if any("prior_loss_weight" in subset for subset in subsets):
        keys.pop("prior_loss_weight", None)
    given.datasets = list(zip(names([str(each.get("image_dir", "")) for each in subsets]), subsets, strict=True))
    folder = keys.get("train_data_dir")
    if not subsets and folder not in OFF and (found := numbered_folders(str(folder))):
        del keys["train_data_dir"]
        given.notes["train_data_dir"] = (Kind.UNNEEDED, "a source for each of its folders that is named as 10_cats")
        given.datasets = list(zip(names([name for name, _ in found]), [each for _, each in found], strict=True))
