"""A run's folder made by hand, with everything that a page shows, and a reader of pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HOSTILE = "</script><script>document.body.id='hit'</script><img src=x onerror=\"document.body.id='hit'\"> & {{ 7 * 7 }}"
"""A name or caption that must stay text."""

SECRET = "hunter2hunter2"
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """The tags of a page, which must close in order, its text, its scripts, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.refers: list[str | None] = []
        self.scripts: list[str] = []
        self.text, self.style, self.policy = "", "", ""
        self.feed(text)
        self.close()
        assert self.open == []
        self.data: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.refers += [
            given[name] for name in ("src", "href", "srcset", "action", "data", "xlink:href") if name in given
        ]
        self.policy += str(given["content"]) if given.get("http-equiv") == "Content-Security-Policy" else ""
        self.scripts += [""] if tag == "script" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        if where == "script":
            self.scripts[-1] += data
        elif where == "style":
            self.style += data
        else:
            self.text += data


def metrics(steps: int) -> list[dict[str, Any]]:
    """Return rows as a run logs them, with values that no short decimal has."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append({"step": step, "samples_seen": 8 * step, "loss": 1 / (step + 2), "lr": 1e-4, "grad_norm": 3 / step})
        rows[-1] |= {"images_per_second": None if step < 3 else 17 / 7, "data_wait_share": 0.3}
        if step % 3 == 0:
            rows[-1] |= {"validate/loss": 0.5 + step / 9, "validate/loss_logsnr_-2": 0.7, "validate_ema/loss": 0.4}
    return rows


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_picture(path: Path, *, shade: int = 0, **texts: str) -> None:
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 16), (shade % 256, 80, 160)).save(path, pnginfo=info)


def make_run(folder: Path, *, steps: int = 9, grids: Sequence[int] = (0, 3, 9), name: str = HOSTILE) -> Path:
    """Write a run that was continued and stopped, with hostile names and a secret."""
    config = {
        "run": {"name": name, "dir": str(folder)},
        "optimizer": {"lr": 1e-4},
        "data": {"urls": [f"https://me:{SECRET}@host/{HOSTILE}.tar"]},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_lines(folder / "metrics.jsonl", metrics(steps))
    start = {"facts": {"device": "1 x cpu", "trains": HOSTILE}, "data": [HOSTILE], "overrides": ["optimizer.lr=1e-4"]}
    (folder / "start.json").write_text(json.dumps(start))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": HOSTILE}}))
    (folder / "stopped.json").write_text(
        json.dumps({"step": steps, "reason": f"Stopped by SIGTERM at step {steps}; saved."})
    )
    continued = {"step": 2, "time": "2026-01-02", "changes": {"log.every_steps": [10, 1]}, "resume_from": None}
    write_lines(folder / "config_history.jsonl", [continued])
    write_lines(folder / "quarantine/rank_0.jsonl", [{"sample": HOSTILE, "reason": "cut off", "step": 4}])
    for step in grids:
        grid = folder / "samples" / f"step_{step}"
        for row in range(2):
            write_picture(grid / f"0{row}_sample.png", shade=20 * step + row, caption=f"{HOSTILE} {row}")
        write_picture(grid / "grid.png")
        write_picture(grid / "loss_by_logsnr.png", points=json.dumps({"x": [-2.5, 1.5], "y": [1.0, step + 0.25]}))
    write_picture(folder / f"samples/step_{min(grids)}/00_original.png", caption=HOSTILE)
    return folder
