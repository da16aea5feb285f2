"""Line charts of losses, drawn with Pillow alone. What they show is gathered in loss_plot.py and loss_curve.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 60, 16, 44, 44
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Attributes:
        label: above the chart.
        colour: as Pillow reads it.
        points: x and y, in order of x.
        dotted: whether each point is marked.
    """

    label: str
    colour: str
    points: Sequence[Point]
    dotted: bool = False


def draw_chart(title: str, lines: Sequence[Line], *, x_format: str, logarithmic: bool = False) -> Image.Image:
    """Return a chart; linear from 0 to the largest y, or logarithmic between the extremes, which must be above 0."""
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    canvas, font = ImageDraw.Draw(picture), ImageFont.load_default(size=13)
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    left, right, low, high = min(xs), max(xs), scale(min(ys)) if logarithmic else min(0.0, *ys), scale(max(ys))

    def place(x: float, scaled: float) -> Point:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (scaled - low) / (high - low) if high > low else 0.0
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    for part in range(5):
        scaled, x = low + (high - low) * part / 4, left + (right - left) * part / 4
        y = place(x, scaled)[1]
        canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], fill="#dddddd")
        canvas.text((8, y - 8), f"{10**scaled if logarithmic else scaled:.3g}", fill="black", font=font)
        canvas.text((place(x, low)[0] - 14, _HEIGHT - _BOTTOM + 8), f"{x:{x_format}}", fill="black", font=font)
    canvas.text((_LEFT, 4), title, fill="black", font=font)
    for number, line in enumerate(lines):
        canvas.text((_LEFT + 160 * number, 22), line.label, fill=line.colour, font=font)
        _draw(canvas, line, [place(x, scale(y)) for x, y in line.points])
    return picture


def _draw(canvas: ImageDraw.ImageDraw, line: Line, places: Sequence[Point]) -> None:
    canvas.line(places, fill=line.colour, width=2)
    for x, y in places if line.dotted else ():
        canvas.ellipse((x - 2, y - 2, x + 2, y + 2), fill=line.colour)
