"""Hooks of mkdocs.yml: pages that lie outside docs/ become part of the site, and links between them hold there.

In the repository docs/lora.md links to ../bench/results/demo.md; on the site the two are lora.md and
bench/results/demo.md. docs/notebook.ipynb is shown as a page too, notebook.md.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `scripts` is a package of this checkout

from scripts.write_reference import with_tables

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "bench/results/*.[mp]*")
NOTEBOOK = "docs/notebook.ipynb"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Add every result to the navigation, after the page that explains the benchmarks."""
    benchmarks = config.nav[-1]["Extend"][-1]["Benchmarks"]
    benchmarks += [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("bench/results/*.md"))]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/ to those of the site, under their path in the repository."""
    for path in sorted(found for pattern in OUTSIDE for found in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    page = notebook_page(json.loads((ROOT / NOTEBOOK).read_text()))
    files.append(File.generated(config, "notebook.md", content=page))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook in the form of a page: its text, and each code cell with what it showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![what the cell shows](data:image/png;base64,{data['image/png']})")
            else:
                text = "".join(output.get("text") or data["text/plain"]).rstrip()
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page with its tables, with links as the site has them, and without the mark of commands that no test runs."""
    uri = page.file.src_uri
    markdown = with_tables(uri, markdown)
    in_docs = page.file.generated_by is None

    def on_site(match: re.Match[str]) -> str:
        here = posixpath.dirname(f"docs/{uri}" if in_docs else uri)
        target = posixpath.normpath(posixpath.join(here, match[1])).removeprefix("docs/")
        if target == "notebook.ipynb" and uri != "notebook.md":
            target = "notebook.md"
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return LINK.sub(on_site, markdown).replace("```bash no-run\n", "```bash\n")
