"""Run the cells of docs/notebook.ipynb in a folder of their own, and write what they show into it.

    python scripts/write_notebook.py

Needs no Jupyter: a cell shows what it prints, and the value of its last expression. The site shows the notebook as a
page (scripts/site_pages.py).
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/notebook.ipynb"


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a notebook whose code cells have been run, in order and in a folder, with their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                outputs = shown("".join(cell["source"]), names, number)
                cell = {**cell, "execution_count": number, "outputs": outputs}
            cells.append(cell)
    return {**notebook, "cells": cells}


def shown(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell with the names of those before it; return its outputs, as the notebook format has them."""
    code = ast.parse(source, f"cell {number}")
    last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)  # type: ignore[attr-defined]
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data(value)}
        )
    return outputs


def data(value: Any) -> dict[str, Any]:
    """Return what a notebook shows of a value: a picture as PNG, all else as text."""
    found: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_png_"):
        found = {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["<picture>"]}
    return found


def main() -> None:
    """Run the notebook and write it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        done = execute(json.loads(NOTEBOOK.read_text()), Path(folder))
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
    sys.stderr.write(f"{NOTEBOOK} has {len(done['cells'])} cells.\n")


if __name__ == "__main__":
    main()
