"""The site that `make docs` builds: no warning, every page in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.style.source import ROOT

pytest.importorskip("mkdocs", reason="the site needs the extra docs: make setup")
pytestmark = pytest.mark.slow

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}
"""What a browser fetches by itself when it opens a page."""


class Page(HTMLParser):
    """What a page of the site refers to, and what it can be referred to by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.code = 0
        self.prose: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.code += tag in ("code", "pre", "script", "style")
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if tag == "a" and name == "href" and value:
                self.links.append(value)
            if (tag, name) in LOADED and value:
                self.loads.append(value)

    def handle_endtag(self, tag: str) -> None:
        self.code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self.code:
            self.prose.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "WARNING" not in done.stderr
    return folder


@cache
def parsed(path: Path) -> Page:
    return Page(path.read_text())


def html_of(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def internal(page: Path, links: list[str]) -> Iterator[tuple[str, Path, str]]:
    """Yield (link, file that it names, anchor) of the links that stay on the site."""
    for link in links:
        if re.match(r"[a-z]+:|//", link):
            continue
        target, _, anchor = link.partition("#")
        yield link, (page.parent / unquote(target)).resolve() if target else page, unquote(anchor)


def test_every_page_of_the_documentation_is_on_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 25
    assert [path for path in pages if not (site / path).exists()] == []
    assert (site / "bench/results/demo.html").exists()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    first = site / "index.html"
    navigated = {path for _, path, _ in internal(first, parsed(first).links)}
    assert [path for path in html_of(site) if path.resolve() not in navigated] == []


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    broken, seen = [], 0
    for page in html_of(site):
        for link, path, anchor in internal(page, [*parsed(page).links, *parsed(page).loads]):
            seen += 1
            there = path.is_file() and (not anchor or path.suffix != ".html" or anchor in parsed(path).ids)
            if not there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert seen > 1000
    assert broken == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = {load for page in html_of(site) for load in parsed(page).loads}
    assert len(loads) > 5
    assert [load for load in loads if re.match(r"https?:|//", load)] == []
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles
    assert not any(re.search(r"url\(['\"]?(https?:)?//|@import ['\"]?(https?:)?//", text) for text in styles)


def test_the_search_works_on_pages_opened_from_the_disk(site: Path) -> None:
    assert "aspect ratio bucketing" in (site / "search/search_index.js").read_text()
    assert "javascripts/iframe-worker.js" in parsed(site / "index.html").loads


def test_lists_and_tables_became_lists_and_tables(site: Path) -> None:
    raw = re.compile(r"^(- |\d+\. \w|\|.*\|$|```)", re.MULTILINE)
    shown = {page.name: raw.findall("".join(parsed(page).prose)) for page in html_of(site)}
    assert {name: found for name, found in shown.items() if found} == {}
