"""Charts of the loss, drawn with Pillow: over the steps of a run (`LossCurve`), and by noise level (`LossPlot`).

Shape legend: G samples of the global batch, N noise levels.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from cascade_train.errors import unwritten
from cascade_train.files.durable import replacing

log = logging.getLogger(__name__)

CURVE_NAME, PLOT_NAME = "loss.png", "loss_by_logsnr.png"
MEMORY = 0.95
"""Share of the running mean that each step keeps."""
COLOURS = {"loss": "#2040a0", "validate/loss": "#c04010", "validate_ema/loss": "#109050"}
"""Of the metrics that are drawn."""
POINTS = 2000
"""Most points of a line; a longer one is thinned."""
LOWEST, HIGHEST, LEVELS = -16.0, 16.0, 64
"""Range of logSNR and its number of levels; what lies outside counts for the level at its end."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 60, 16, 44, 44
_NOW, _BEFORE = "#2040a0", "#b0b0b0"
Point = tuple[float, float]


class LossCurve:
    """Draws the loss of each step, and that of validation, to `loss.png` beside `metrics.jsonl`."""

    def __init__(self, metrics: Path, *, is_main: bool) -> None:
        self._metrics = metrics
        self._is_main = is_main
        self.forget()

    def forget(self) -> None:
        """Read the metrics from their beginning at the next drawing: lines have been cut off."""
        self._read_bytes = 0
        self._curves = {key: Curve() for key in COLOURS}

    def draw(self) -> None:
        """Draw the metrics so far. A full disk or a damaged line is only logged."""
        if not self._is_main or not self._metrics.is_file():
            return
        path = self._metrics.with_name(CURVE_NAME)
        try:
            self._read()
            picture = draw_curve(self._curves)
            if picture is not None:
                with replacing(path) as partial:
                    picture.save(partial, format="png")
        except (OSError, ValueError) as error:
            log.warning("%s could not be drawn (%s); the numbers are in %s.", path, error, self._metrics)

    def _read(self) -> None:
        with self._metrics.open("rb") as lines:
            lines.seek(self._read_bytes)
            for line in lines:
                row = json.loads(line)
                for key, curve in self._curves.items():
                    if row.get(key) is not None:
                        curve.add(row["step"], row[key])
                self._read_bytes += len(line)


class Curve:
    """The values of a metric at its steps, and their exponential running mean, started at the first."""

    def __init__(self) -> None:
        self.steps, self.values, self.means = array("q"), array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        """Append the value of a step."""
        self.means.append(MEMORY * self.means[-1] + (1 - MEMORY) * value if self.means else value)
        self.steps.append(step)
        self.values.append(value)

    def points(self, values: Sequence[float]) -> list[Point]:
        """Return (step, value) points of `values` or `means`, at most `POINTS` evenly spaced ones and the last."""
        places = [*range(0, len(values), -(-len(values) // POINTS)), len(values) - 1]
        return [(self.steps[place], values[place]) for place in places]


def draw_curve(curves: Mapping[str, Curve]) -> Image.Image | None:
    """Return a chart of the curves by the keys of `COLOURS`; None where there is no loss."""
    loss = curves["loss"]
    if not loss.values:
        return None
    lines = [
        Line(label="each step", colour="#b8c4e8", points=loss.points(loss.values)),
        Line(label="running mean", colour=COLOURS["loss"], points=loss.points(loss.means)),
    ]
    for key, colour in COLOURS.items():
        if key != "loss" and curves[key].values:
            label = f"{key} (unweighted, at fixed noise levels)"
            points = curves[key].points(curves[key].values)
            lines.append(Line(label=label, colour=colour, points=points, dotted=True))
    positive = all(y > 0 for line in lines for _, y in line.points)
    return draw_chart("loss over optimizer steps", lines, x_format=".0f", logarithmic=positive)


class LossPlot:
    """Mean unweighted loss of each noise level since the last drawing, gathered on the device; of fixed size."""

    def __init__(self, *, directory: Path, device: torch.device, is_main: bool) -> None:
        self._directory = directory
        self._is_main = is_main
        self._sums_2N = torch.zeros(2, LEVELS, device=device)
        self._levels_N = torch.arange(LEVELS, device=device)
        self._before: list[Point] = []

    def add(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """Add the samples of an optimizer step, (G,) each. Does not sync with the host."""
        position_G = (logsnr_G.float() - LOWEST) / (HIGHEST - LOWEST) * LEVELS
        level_G = position_G.clamp(0, LEVELS - 1).long()
        is_level_GN = (level_G[:, None] == self._levels_N).float()
        self._sums_2N += torch.stack([loss_raw_G.float() @ is_level_GN, is_level_GN.sum(dim=0)])

    def forget(self) -> None:
        """Drop the samples since the last drawing: their steps are undone."""
        self._sums_2N.zero_()

    def draw(self, step: int) -> list[Path]:
        """Draw the samples since the last call, those before it in grey, to `step_<n>/`; return the file on rank 0."""
        losses, counts = self._sums_2N.tolist()
        self._sums_2N.zero_()
        points = [
            (LOWEST + (level + 0.5) * (HIGHEST - LOWEST) / LEVELS, loss / count)
            for level, (loss, count) in enumerate(zip(losses, counts, strict=True))
            if count
        ]
        before, self._before = self._before, points
        if not self._is_main or not points:
            return []
        file = self._directory / f"step_{step}" / PLOT_NAME
        try:
            self._directory.mkdir(exist_ok=True)  # and no run directory that was removed
            file.parent.mkdir(exist_ok=True)
            draw_losses(points, before).save(file, pnginfo=_as_text(points))
        except OSError as error:
            file.unlink(missing_ok=True)
            log.warning("%s. The run goes on without this plot.", unwritten(file, error))
            return []
        return [file]


def _as_text(points: Sequence[Point]) -> PngInfo:
    """Return the numbers of a plot, which its file carries for the page of the run."""
    info = PngInfo()
    x, y = zip(*points, strict=True)
    info.add_text("points", json.dumps({"x": x, "y": y}))
    return info


def draw_losses(points: Sequence[Point], before: Sequence[Point]) -> Image.Image:
    """Return a chart of (logSNR, loss) points, the earlier ones in grey."""
    lines = [
        Line(label="since the last plot", colour=_NOW, points=points, dotted=True),
        Line(label="before it", colour=_BEFORE, points=before, dotted=True),
    ]
    return draw_chart("unweighted loss over logSNR (left: noise, right: data)", lines, x_format=".1f")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart: its label, its colour for Pillow, and points in order of x, each marked where `dotted`."""

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
        places = [place(x, scale(y)) for x, y in line.points]
        canvas.line(places, fill=line.colour, width=2)
        for x, y in places if line.dotted else ():
            canvas.ellipse((x - 2, y - 2, x + 2, y + 2), fill=line.colour)
    return picture
