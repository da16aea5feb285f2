"""Charts of the loss, drawn with matplotlib: over the steps of a run (`LossCurve`), and by noise level (`LossPlot`).

Shape legend: G samples of the global batch, N noise levels.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cascade_train.errors import unwritten
from cascade_train.files.durable import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

CURVE_NAME, PLOT_NAME = "loss.png", "loss_by_logsnr.png"
MEMORY = 0.95
"""Share of the running mean that each step keeps."""
COLOURS = {"loss": "#2040a0", "validate/loss": "#c04010", "validate_ema/loss": "#109050"}
"""Of the metrics that are drawn."""
POINTS = 2000
"""Most points of a line."""
LOWEST, HIGHEST, LEVELS = -16.0, 16.0, 64
"""Range of logSNR and its number of levels; what lies outside counts for the level at its end."""

Point = tuple[float, float]


class LossCurve:
    """Draws the loss of each step, and that of validation, to `loss.png` beside `metrics.jsonl`."""

    def __init__(self, metrics: Path, *, is_main: bool) -> None:
        self._metrics = metrics
        self._is_main = is_main
        self._read_bytes = 0
        self._curves = {key: Curve() for key in COLOURS}

    def draw(self) -> None:
        """Draw the metrics so far. Whatever goes wrong is only logged."""
        if not self._is_main or not self._metrics.is_file():
            return
        path = self._metrics.with_name(CURVE_NAME)
        try:
            self._read()
            if self._curves["loss"].values:
                with replacing(path) as partial:
                    draw_curve(self._curves).savefig(partial)
        except Exception as error:  # a damaged line, a full disk, a matplotlib that cannot be loaded
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
        """Append a value."""
        self.means.append(MEMORY * self.means[-1] + (1 - MEMORY) * value if self.means else value)
        self.steps.append(step)
        self.values.append(value)

    def points(self, values: Sequence[float]) -> list[Point]:
        """(step, value) points of `values` or `means`, at most `POINTS` evenly spaced ones and the last."""
        places = [*range(0, len(values), -(-len(values) // POINTS)), len(values) - 1]
        return [(self.steps[place], values[place]) for place in places]


def draw_curve(curves: Mapping[str, Curve]) -> Figure:
    """A chart of the curves by the keys of `COLOURS`, of which that of the loss has values."""
    loss = curves["loss"]
    lines = [
        (loss.points(loss.values), {"label": "each step", "color": "#b8c4e8"}),
        (loss.points(loss.means), {"label": "running mean", "color": COLOURS["loss"]}),
    ]
    for key in [key for key in COLOURS if key != "loss" and curves[key].values]:
        label = f"{key} (weighted as the loss, on held-out samples)"
        lines.append((curves[key].points(curves[key].values), {"label": label, "color": COLOURS[key], "marker": "."}))
    chart = draw_chart("Loss over optimizer steps", "optimizer step", lines)
    if all(y > 0 for points, _ in lines for _, y in points):
        (axes,) = chart.axes
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    return chart


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
            x, y = zip(*points, strict=True)
            numbers = json.dumps({"x": x, "y": y})  # for the page of the run
            draw_losses(points, before).savefig(file, metadata={"points": numbers})
        except Exception as error:  # also a matplotlib that cannot be loaded
            file.unlink(missing_ok=True)
            log.warning("%s. The run goes on without this plot.", unwritten(file, error))
            return []
        return [file]


def draw_losses(points: Sequence[Point], before: Sequence[Point]) -> Figure:
    """A chart of (logSNR, loss) points, the earlier ones in grey."""
    lines = [
        (before, {"label": "before the last plot", "color": "#b0b0b0", "marker": "."}),
        (points, {"label": "since the last plot", "color": COLOURS["loss"], "marker": "."}),
    ]
    chart = draw_chart("Unweighted loss by noise level", "logSNR (left: noise, right: data)", lines)
    chart.axes[0].set_ylim(bottom=min(0.0, *(y for line, _ in lines for _, y in line)))
    return chart


def draw_chart(title: str, x_label: str, lines: Sequence[tuple[Sequence[Point], dict[str, Any]]]) -> Figure:
    """A chart of the loss, of points in order of x and how matplotlib draws them.

    With a canvas of its own: neither pyplot, whose state belongs to the program that a training runs in, nor the
    backend that a notebook chooses, without whose package matplotlib cannot be imported.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: not at the start of a run
        from matplotlib.figure import Figure
    finally:
        os.environ |= {} if backend is None else {"MPLBACKEND": backend}

    chart = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(chart)
    axes = chart.subplots()
    for points, look in lines:
        if points:
            axes.plot(*zip(*points, strict=True), **look)
    axes.set(title=title, xlabel=x_label, ylabel="loss")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="both", color="#dddddd")
    chart.legend(loc="outside lower center", ncols=2, frameon=False)
    return chart
