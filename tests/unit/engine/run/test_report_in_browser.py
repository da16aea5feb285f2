"""The page of a run in a headless browser, where one is installed: its script draws and answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from cascade_train.engine.run.report import page, run_data
from tests.unit.engine.run.report_page import HOSTILE, make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--enable-logging=stderr")
USE = """<script>
const seen = {};
seen.charts = [...document.querySelectorAll(".chart figcaption span")].map((each) => each.textContent);
seen.lines = document.querySelectorAll("#charts .chart")[1].querySelectorAll("svg path").length;
document.querySelectorAll("#charts .chart")[1].querySelector(".legend button").click();
seen.toggled = document.querySelectorAll("#charts .chart")[1].querySelectorAll("svg path").length;
const scale = document.querySelector("button.scale");
seen.scales = [scale.textContent, (scale.click(), scale.textContent)];
const slider = byId("step"), picture = () => document.querySelectorAll(".now img")[1].src;
seen.step = [document.querySelector("#steps output").textContent, picture()];
slider.value = 0;
slider.dispatchEvent(new Event("input"));
seen.first = [document.querySelector("#steps output").textContent, picture()];
seen.captions = [...document.querySelectorAll(".prompt p")].map((each) => each.textContent);
const drawing = document.querySelector("#charts svg"), box = drawing.getBoundingClientRect();
drawing.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 9, clientY: box.top + 20}));
seen.tip = document.querySelector(".tip").textContent;
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_draws_the_page_and_its_controls_work(tmp_path: Path) -> None:
    data = run_data(make_run(tmp_path / "run"), bases={})
    data["runs"][0]["series"]["tight"] = {"x": [1, 2], "y": [0.3, 0.3 + 2**-54]}  # no number lies in between
    (tmp_path / "page.html").write_text(page(data).replace("</body>", USE))
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Uncaught" not in done.stderr
    assert '<body id="hit"' not in done.stdout
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    seen = json.loads(unescape(found[1]))
    names = ["loss", "validation: loss", "learning rate", "gradient norm", "images per second"]
    assert seen["charts"][:5] == names
    assert seen["charts"][-1].startswith("training loss by noise level")
    assert seen["toggled"] == seen["lines"] - 1 == 1
    assert seen["scales"] == ["log", "linear"]
    row = data["samples"]["rows"][0]["pictures"]["sample"]
    assert seen["step"] == ["step 9", row[2]]
    assert seen["first"] == ["step 0", row[0]]
    assert seen["captions"] == [f"{HOSTILE} 0", f"{HOSTILE} 1"]
    assert seen["tip"].startswith("step 9loss: 0.0909091")
