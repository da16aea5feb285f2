"""What the recipes of open-diffusion, EveryDream and MindONE should say: their files, as the importer reads them.

The files lie in tests/golden/original/seeds.json, as their pages print them or name them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from cascade_train.commands.recipe import ImportArgs, translate
from cascade_train.config.recipes.reading import flat, resolved
from cascade_train.config.recipes.recipe import Recipe

FILE = Path(__file__).resolve().parents[2] / "golden" / "original" / "seeds.json"
SEEDS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
RECIPES_OF_SEEDS = {
    "sd_from_scratch": "open_diffusion/template",
    "sd_finetune": "open_diffusion/finetune",
    "sd_imagenet": "open_diffusion/imagenet",
    "sd_everydream": "everydream/standard",
    "sd_everydream_first": "everydream/first",
    "sdxl_finetune": "mindone/guide",
    "sdxl_cached": "mindone/guide",
    "sdxl_lora": "mindone/lora",
    "sdxl_edm": "mindone/edm",
}
"""Recipe that ships -> the file that it is of."""

PLACES = ("run.name", "run.dir", "tracker", "model.weights", "model.vae.weights", "model.text_encoder.weights")
TOKENIZER = ("model.text_encoder.subfolder", "model.text_encoder.tokenizer", "model.text_encoder.tokenizer_subfolder")
OURS = {
    None: (*PLACES, *TOKENIZER, "attention", "data.urls", "data.path", "data.idx_to_prompt", "defaults.tracker"),
    "sdxl_cached": ("defaults.data", "data.crop", "data.image_column", "data.caption_column"),
}
"""Keys that a recipe leaves to its user or has otherwise: places, xformers (here sdpa), and what a cache holds."""


@functools.cache
def imported(name: str, *more: str) -> Recipe:
    """Return what the importer makes of a file; `more` are flags."""
    flags = " ".join(more) or None
    args = ImportArgs(source=f"{name}.yaml", out="experiment/seed.yaml", ranks=SEEDS[name]["ranks"], flags=flags)
    return translate(resolved(SEEDS[name]["file"]), args)


def seed_values(recipe: str) -> dict[str, Any]:
    """Return the values that a recipe should have, by our dotted keys, and its choices by `defaults.<group>`."""
    name = RECIPES_OF_SEEDS[recipe]
    found = imported(name, *(("--data_path dataset",) if name.startswith("mindone") else ()))
    chosen = {f"defaults.{group.removeprefix('+')}": option for group, option in found.groups.items()}
    ours = (*OURS[None], *OURS.get(recipe, ()))
    values = {key: value for key, value in (found.values | chosen).items() if not key.startswith(ours)}
    return dict(flat(values))
