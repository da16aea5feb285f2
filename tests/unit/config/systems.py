"""What other trainers' code does, by tests/golden/original/systems.yaml, which was read from their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[2] / "golden" / "original" / "systems.yaml"
SYSTEMS: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
SYSTEM_OF = {recipe: system for system, entry in SYSTEMS.items() for recipe in entry["recipes"]}
"""Recipe that ships -> the trainer that it is of."""


def rows_of(system: str, recipe: str | None = None) -> dict[str, Any]:
    """Return our keys with the values that a trainer's code takes, and with those of a recipe's file."""
    entry = SYSTEMS[system]
    return {key: row["value"] for key, row in (entry["rows"] | entry["recipes"].get(recipe, {})).items()}


def differing(recipe: str) -> dict[str, Any]:
    """Return what a recipe has otherwise than its trainer on purpose."""
    entries = SYSTEMS[SYSTEM_OF[recipe]]["differs"].items()
    return {key: each["value"] for key, each in entries if recipe in each.get("recipes", [recipe])}
