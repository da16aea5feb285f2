"""The notebook of the documentation runs, and shows what is stored in it, numbers aside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.write_notebook import NOTEBOOK, execute


def texts(notebook: dict[str, Any]) -> list[str]:
    """Return what each code cell shows, with # for each number, and how wide tables are left aside."""
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = ["".join("".join(o.get("text", o.get("data", {}).get("text/plain"))) for o in each) for each in outputs]
    return [re.sub(r" +", " ", re.sub(r"\d[\d.,]*", "#", text)) for text in found]


@pytest.mark.slow
def test_the_cells_run_and_show_what_is_stored(tmp_path: Path):
    stored = json.loads(NOTEBOOK.read_text())
    assert texts(execute(stored, tmp_path)) == texts(stored)
    assert len(texts(stored)) >= 8
