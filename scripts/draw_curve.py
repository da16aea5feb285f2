"""Draw the loss of a run over its steps, logarithmic, with a running mean: draw_curve.py METRICS.jsonl OUT.png."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 320, 64, 36, 24
MEMORY = 0.95
"""Share of the running mean that each step keeps."""


def draw_curve(losses: list[float]) -> Image.Image:
    """Return a picture of positive losses, one per optimizer step."""
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=13)
    low, high = (math.log10(f(losses)) for f in (min, max))

    def place(step: int, loss: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 12) * step / max(len(losses) - 1, 1)
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(loss)) / max(high - low, 1e-9)

    for part in range(5):
        loss = 10 ** (low + (high - low) * part / 4)
        step = (len(losses) - 1) * part // 4
        draw.line([(LEFT, place(0, loss)[1]), (WIDTH - 12, place(0, loss)[1])], fill="#dddddd")
        draw.text((8, place(0, loss)[1] - 8), f"{loss:.3g}", fill="black", font=font)
        draw.text((place(step, loss)[0] - 12, HEIGHT - BOTTOM + 8), str(step + 1), fill="black", font=font)
    draw.line([place(step, loss) for step, loss in enumerate(losses)], fill="#b8c4e8")
    draw.line([place(step, mean) for step, mean in enumerate(running_mean(losses))], fill="#2040a0", width=2)
    draw.text((LEFT, 4), "loss over optimizer steps", fill="black", font=font)
    return picture


def running_mean(losses: list[float]) -> list[float]:
    """Return the exponential running mean, started at the first value."""
    means = [losses[0]]
    for loss in losses[1:]:
        means.append(MEMORY * means[-1] + (1 - MEMORY) * loss)
    return means


if __name__ == "__main__":
    metrics, out = map(Path, sys.argv[1:3])
    draw_curve([json.loads(line)["loss"] for line in metrics.read_text().splitlines()]).save(out)
    sys.stdout.write(f"{out}\n")
