"""The files of EveryDream, MindONE, sd-scripts, OneTrainer and SimpleTuner, laid out flat, and what each trains.

A file is completed by those that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cascade_train.config.recipes.datasets import names, numbered_folders
from cascade_train.config.recipes.reading import flat, found_beside, read_source, scalar
from cascade_train.config.recipes.recipe import Kind

Values = Mapping[str, Any]
Datasets = list[tuple[str, dict[str, Any]]]


@dataclass(kw_only=True)
class Given:
    """A trainer's configuration.

    Attributes:
        keys: its own, dotted, with those that it has by default.
        datasets: name -> keys of a dataset; empty where the configuration itself describes one.
        family: what it trains, by the trainer's word or ours.
        implied: keys that the file does not have.
        notes: what became of keys, files and datasets that are not taken over by the table.
    """

    keys: dict[str, Any]
    datasets: Datasets = field(default_factory=list)
    family: str = ""
    implied: set[str] = field(default_factory=set)
    notes: dict[str, tuple[Kind, str]] = field(default_factory=dict)


def system_of(source: Any) -> str | None:
    """Return the trainer that a configuration is of, recognised by its keys; None = unknown."""
    if isinstance(source, list):
        return (
            "simpletuner"
            if any({"instance_data_dir", "dataset_type", "caption_strategy"} & each.keys() for each in source)
            else None
        )
    keys = {str(key).removeprefix("--") for key in source}
    inner = {key for value in source.values() if isinstance(value, dict) for key in value}
    signs = {
        "everydream1": "lightning" in keys,
        "mindone": "optim" in keys or "base_learning_rate" in inner,
        "onetrainer": bool(keys & {"training_method", "concept_file_name", "base_model_name"}),
        "simpletuner": bool(keys & {"model_family", "data_backend_config", "dataloader_config"}),
        "everydream": bool(keys & {"data_root", "resume_ckpt", "cond_dropout"}),
        "kohya": bool(
            (keys | inner)
            & {"datasets", "pretrained_model_name_or_path", "train_data_dir", "network_module", "optimizer_args"}
        ),
    }
    return next((system for system, fits in signs.items() if fits), None)


def _layout(source: Any, path: Path, table: Values) -> Given:
    """Lay a file out flat, with the files that it names below their places."""
    given = Given(keys={})
    whole_source = dict(source)
    for key, place in table["follows"].items():
        name = whole_source.get(key)
        if not isinstance(name, str) or (place and whole_source.get(place)):
            continue
        found = found_beside(name, path)
        if found is None:
            given.notes[key] = (Kind.YOURS, f"{name} is neither here nor beside the file: import where it can be found")
        else:
            content = read_source(found)
            whole_source |= {place: content} if place else dict(content)
    given.keys = dict(flat(whole_source))
    return given


def _everydream1(source: Any, path: Path, table: Values) -> Given:
    """Lay out a training file with its one folder of pictures."""
    given = _layout(source, path, table)
    given.datasets, given.family = [("pictures", {})], "sd15"
    return given


def _kohya(source: Any, path: Path, table: Values) -> Given:
    """Lay out a training file, whose sections mean nothing, with its subsets; of several datasets one size is taken."""
    plain: dict[str, Any] = {}
    for key, value in source.items():
        plain |= value if isinstance(value, dict) and key != "general" else {key: value}
    given = _layout(plain, path, table)
    listed = given.keys.pop("datasets", None) or []
    general = {k.removeprefix("general."): given.keys.pop(k) for k in list(given.keys) if k.startswith("general.")}
    subsets = [{**general, **without(each, "subsets"), **own} for each in listed for own in each.get("subsets", [])]
    for subset in subsets:
        given.keys |= {"train_batch_size": subset["batch_size"]} if "batch_size" in subset else {}
        if "is_reg" in subset:
            subset["is_reg"] = given.keys.get("prior_loss_weight", 1.0) if subset["is_reg"] else 1.0
    folders = [str(subset.get("image_dir", subset.get("metadata_file", ""))) for subset in subsets]
    given.datasets = list(zip(names(folders), subsets, strict=True))
    train_folder = given.keys.get("train_data_dir")
    if not subsets and isinstance(train_folder, str) and (found := numbered_folders(train_folder)):
        del given.keys["train_data_dir"]
        given.notes["train_data_dir"] = (Kind.TAKEN, "a source for each folder that is named as 10_cats")
        given.datasets = list(zip(names([name for name, _ in found]), [each for _, each in found], strict=True))
    return given


def _onetrainer(source: Any, path: Path, table: Values) -> Given:
    """Lay out a training file with the concepts that are enabled."""
    given = _layout(source, path, table)
    concepts = [dict(flat(each)) for each in given.keys.pop("concepts", None) or []]
    titles = names([str(each.get("name") or each.get("path", "")) for each in concepts])
    for title, concept in zip(titles, concepts, strict=True):
        if concept.get("balancing_strategy", "REPEATS") != "REPEATS":
            concept.pop("balancing", None)
        if not concept.get("enabled", True):
            given.notes[title] = (Kind.UNNEEDED, "the concept is disabled")
        elif concept.get("type", "STANDARD") != "STANDARD":
            why = "held-out samples are validate.share; prior prediction has no equivalent"
            given.notes[title] = (Kind.MISSING, f"a concept of type {concept['type']}: {why}")
        else:
            given.datasets.append((title, concept))
    given.family = str(given.keys.get("model_type", "STABLE_DIFFUSION_15"))
    return given


def _simpletuner(source: Any, path: Path, table: Values) -> Given:
    """Lay out a configuration, or a list of backends alone, with those of them that hold pictures."""
    plain = {"backends": source} if isinstance(source, list) else {k.removeprefix("--"): v for k, v in source.items()}
    plain = {table["renamed"].get(key, key): scalar(value) for key, value in plain.items()}
    given = _layout(plain, path, table)
    backends = [dict(flat(each)) for each in given.keys.pop("backends", None) or []]
    for title, backend in zip(names([str(each.get("id", "")) for each in backends]), backends, strict=True):
        kind = backend.get("dataset_type", "image")
        if backend.get("disabled") or backend.get("disable"):
            given.notes[title] = (Kind.UNNEEDED, "the dataset is disabled")
        elif kind not in ("image", "images"):
            given.notes[title] = (Kind.UNNEEDED, f"a dataset of {kind}: cascade-train cache makes caches")
        else:
            given.datasets.append((title, {key: scalar(value) for key, value in backend.items()}))
    flavour = str(given.keys.get("model_flavour") or "")
    family = str(given.keys.get("model_family") or "")
    given.family = f"{family} {flavour}" if f"{family} {flavour}" in table["models"] else family
    return given


def without(node: Values, *keys: str) -> dict[str, Any]:
    """Return a mapping without some keys."""
    return {key: value for key, value in node.items() if key not in keys}


def _stable_diffusion(keys: Values) -> str:
    """Return the family by what the weights are called, and by the keys that only one of them has."""
    name = str(keys.get("pretrained_model_name_or_path") or keys.get("resume_ckpt") or "").lower()
    if keys.get("v2") or "2-1" in name or "v2" in name.replace("v2.", "v2-").split("-"):
        return "sd21_base" if "base" in name or keys.get("v_parameterization") is False else "sd21"
    is_xl = "xl" in name or keys.get("cache_text_encoder_outputs") is not None or "learning_rate_te1" in keys
    return "sdxl" if is_xl else "sd15"


LAYOUTS = {
    "kohya": _kohya,
    "everydream": _layout,
    "everydream1": _everydream1,
    "mindone": _layout,
    "onetrainer": _onetrainer,
    "simpletuner": _simpletuner,
}
FAMILIES = {
    **dict.fromkeys(("kohya", "everydream"), _stable_diffusion),
    "mindone": lambda keys: "sdxl refiner" if "refiner" in str(keys.get("version", "")).lower() else "sdxl",
    **dict.fromkeys(("onetrainer", "simpletuner"), lambda keys: "an unnamed model"),
}
"""By system: how a file is laid out, and the family that it trains where its layout does not say."""
