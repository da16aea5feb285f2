"""Hooks of mkdocs.yml: pages that lie outside docs/ become part of the site, and links between them hold there.

In the repository docs/lora.md links to ../bench/results/demo.md; on the site the two are lora.md and
bench/results/demo.md.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "bench/results/*.[mp]*")
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
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page with its links as the site has them, and without the mark of commands that no test runs."""
    uri = page.file.src_uri
    in_docs = page.file.generated_by is None

    def on_site(match: re.Match[str]) -> str:
        here = posixpath.dirname(f"docs/{uri}" if in_docs else uri)
        target = posixpath.normpath(posixpath.join(here, match[1])).removeprefix("docs/")
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return LINK.sub(on_site, markdown).replace("```bash no-run\n", "```bash\n")
