"""The recipes of open-diffusion, EveryDream and MindONE, their files, and the key of ours that holds each value.

The files lie in tests/golden/original/seeds.json, as their pages print them or name them; the keys in seeds_keys.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "original"
SEEDS: dict[str, dict[str, Any]] = json.loads((FOLDER / "seeds.json").read_text())
HELD: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "seeds_keys.yaml").read_text())
"""By recipe: `of`, its file; `keys` of the file with ours and their values; `places` that a user gives; `without` a key
of ours, by the reason; `silent`: what its trainer does where the file says nothing."""
