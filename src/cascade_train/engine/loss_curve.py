"""The loss over the steps of a run, with that of validation: read from its metrics, drawn beside them.

The loss by noise level is drawn in loss_plot.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from cascade_train.engine.chart import Line, Point, draw_chart
from cascade_train.files.durable import replacing

log = logging.getLogger(__name__)

FILE_NAME = "loss.png"
MEMORY = 0.95
"""Share of the running mean that each step keeps."""
COLOURS = {"loss": "#2040a0", "validate/loss": "#c04010", "validate_ema/loss": "#109050"}
"""Of the metrics that are drawn."""
POINTS = 2000
"""Of a line at most; a longer one is thinned."""


class LossCurve:
    """Draws a run's metrics to `loss.png` beside them; the file is whole or as it was."""

    def __init__(self, metrics: Path, *, is_main: bool) -> None:
        """Store; touches no file.

        Args:
            metrics: the run's `metrics.jsonl`.
            is_main: whether this rank draws.
        """
        self._metrics = metrics
        self._is_main = is_main
        self.forget()

    def forget(self) -> None:
        """Read the metrics from their beginning at the next drawing: lines have been cut off."""
        self._read_bytes = 0
        self._points: dict[str, list[Point]] = {key: [] for key in COLOURS}

    def draw(self) -> None:
        """Draw what the metrics hold by now. A full disk or a damaged line stops nothing."""
        if not self._is_main or not self._metrics.is_file():
            return
        path = self._metrics.with_name(FILE_NAME)
        try:
            self._read()
            picture = draw_curve(self._points)
            if picture is not None:
                with replacing(path) as partial:
                    picture.save(partial, format="png")
        except (OSError, ValueError) as error:
            log.warning("%s could not be drawn (%s); the numbers are in %s.", path, error, self._metrics)

    def _read(self) -> None:
        """Take in the lines since the last drawing."""
        with self._metrics.open("rb") as lines:
            lines.seek(self._read_bytes)
            for line in lines:
                row = json.loads(line)
                for key, points in self._points.items():
                    if row.get(key) is not None:
                        points.append((row["step"], row[key]))
                self._read_bytes += len(line)


def draw_curve(points: Mapping[str, Sequence[Point]]) -> Image.Image | None:
    """Return a chart of (step, value) points; None where there is no loss.

    Args:
        points: by the keys of `COLOURS`.
    """
    loss = points["loss"]
    if not loss:
        return None
    lines = [
        Line(label="each step", colour="#b8c4e8", points=_thinned(loss)),
        Line(label="running mean", colour=COLOURS["loss"], points=_thinned(running_mean(loss))),
    ]
    for key, colour in COLOURS.items():
        if key != "loss" and points[key]:
            label = f"{key} (unweighted, at fixed noise levels)"
            lines.append(Line(label=label, colour=colour, points=points[key], dotted=True))
    positive = all(y > 0 for line in lines for _, y in line.points)
    return draw_chart("loss over optimizer steps", lines, x_format=".0f", logarithmic=positive)


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Return the exponential running mean, started at the first value."""
    mean, means = points[0][1], []
    for step, loss in points:
        mean = MEMORY * mean + (1 - MEMORY) * loss
        means.append((step, mean))
    return means


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    return [*points[:: -(-len(points) // POINTS)], points[-1]]
