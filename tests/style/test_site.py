"""The site that `make docs` builds: mkdocs itself refuses links, anchors and pages of the menu that are not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.style.source import ROOT

pytest.importorskip("mkdocs", reason="the site needs the extra docs: make setup")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_on_the_site_and_can_be_searched(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 25
    assert [path for path in pages if not (site / path).exists()] == []
    assert (site / "bench/results/demo.html").exists()
    assert "aspect ratio" in (site / "search/search_index.js").read_text()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|iframe)[^>]* src="?(https?:|//)|<link[^>]* rel="?stylesheet"?[^>]*https?:""")
    assert [page.name for page in site.rglob("*.html") if loads.search(page.read_text())] == []
